"""Which job this process belongs to, and whether it was started again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from instep.state.environment import read_number

JOB_ID = "INSTEP_JOB_ID"
RESTART = "INSTEP_RESTART"
MIN_NODES = "INSTEP_MIN_NODES"  # set where a job goes on with fewer nodes than it asked for


class Job(NamedTuple):
    """A job that may be started again.

    Args:
        id: its name, the same on all nodes and in all its starts, and no other job's.
        restart: how often all of it was started again; the same on all nodes.
    """

    id: str
    restart: int


def read_job(environ: Mapping[str, str] | None = None) -> Job | None:
    """The job, as the elastic agent's `INSTEP_JOB_ID` and `INSTEP_RESTART` say it, or SLURM of a step of its own.

    Args:
        environ: the variables; `os.environ` by default.

    Returns:
        The job; None where nobody would start this process again.

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
    if job and step:  # without a step several programs of one job script would be the same job
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        return Job(
            "-".join(filter(None, ("slurm", cluster, job, step))), read_number(environ, "SLURM_RESTART_COUNT", 0)
        )
    return None
