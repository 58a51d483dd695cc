"""Rank, world size and job of this process, as read from environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from instep.errors import SettingError

Launcher = Literal["none", "torchrun", "openmpi", "mvapich", "intelmpi", "mpich", "slurm", "xla"]

JOB_ID = "INSTEP_JOB_ID"
RESTART = "INSTEP_RESTART"
MIN_NODES = "INSTEP_MIN_NODES"  # variable that is set if a job may run with fewer nodes than it asked for


@dataclass(frozen=True)
class ProcessEnvironment:
    """Place of this process in its job: its ranks and world sizes, as set by its launcher.

    Args:
        rank: number of the process in the job, from 0 to `world_size - 1`.
        local_rank: number of the process on its node, from 0 to `local_world_size - 1`.
        world_size: number of processes in the job.
        local_world_size: number of processes on this node.
        node_rank: number of the node, from 0 to `num_nodes - 1`.
        num_nodes: number of nodes in the job.
        launcher: launcher that set the variables; "none" for a process started by hand.
        restart_count: how often this node's agent has restarted its workers.

    Example:
        >>> from instep.state import read_environment
        >>> read_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}).rank
        3
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: Launcher = "none"
    restart_count: int = 0


def read_number(
    environ: Mapping[str, str],
    name: str,
    default: int | None = None,
    low: int = 0,
    high: int | None = None,
    beside: Iterable[str] = (),
) -> int:
    """Read the integer of an environment variable.

    Args:
        environ: the environment variables.
        name: name of the variable.
        default: value if the variable is not set or is empty; with None, such a variable is an error.
        low: the smallest allowed value.
        high: the largest allowed value; None for no limit.
        beside: names of other variables of the same launcher. The error for a missing variable shows which of them are
            set.

    Raises:
        SettingError: the variable is missing, is not an integer, or is out of range.
    """
    text = environ.get(name)
    if text is None or text == "":
        if default is None:
            known = ", ".join(f"{other}={environ[other]}" for other in beside if other in environ)
            raise SettingError(
                f"{name} is not set, but the environment says that this process is one of several ({known}). Start it "
                f"with torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK together; unset them to run alone.",
                field=name,
            )
        return default
    try:
        number = int(text)
    except ValueError:
        raise SettingError(
            f"the environment variable {name}={text!r} is not an integer", field=name, got=text
        ) from None
    if number < low or (high is not None and number > high):
        bound = f"from {low} to {high}" if high is not None else f"at least {low}"
        raise SettingError(f"the environment variable {name}={number} must be {bound}", field=name, got=number)
    return number


class Job(NamedTuple):
    """A job that its launcher may restart.

    Args:
        id: unique name of the job, the same on all nodes and after all restarts.
        restart: how often the whole job was restarted; the same on all nodes.
    """

    id: str
    restart: int


def read_job(environ: Mapping[str, str] | None = None) -> Job | None:
    """Read the job from INSTEP_JOB_ID and INSTEP_RESTART, which the elastic agent sets, or from the variables of SLURM.

    Args:
        environ: the environment variables; `os.environ` by default.

    Returns:
        The job; None if no variable names one, so that no launcher would restart this process.

    Example:
        >>> read_job({"INSTEP_JOB_ID": "5e1f", "INSTEP_RESTART": "2"})
        Job(id='5e1f', restart=2)
        >>> read_job({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"})
        Job(id='slurm-7-0', restart=1)
    """
    environ = os.environ if environ is None else environ
    if environ.get(JOB_ID):
        return Job(environ[JOB_ID], read_number(environ, RESTART, 0))
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    if job and step:  # the step id distinguishes several programs of one job script
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        return Job(
            "-".join(filter(None, ("slurm", cluster, job, step))), read_number(environ, "SLURM_RESTART_COUNT", 0)
        )
    return None
