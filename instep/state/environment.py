"""The place of this process in its job, and how environment variables are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from instep.errors import SettingError

Launcher = Literal["none", "torchrun", "openmpi", "mvapich", "intelmpi", "mpich", "slurm", "xla"]


@dataclass(frozen=True)
class ProcessEnvironment:
    """The place of this process in its job, as its launcher gave it.

    Args:
        rank: 0 to `world_size - 1`, over all nodes.
        local_rank: 0 to `local_world_size - 1`, on this node.
        world_size: processes in the job.
        local_world_size: processes on this node.
        node_rank: 0 to `num_nodes - 1`.
        num_nodes: nodes in the job.
        launcher: who set the variables; "none" for a process started by hand.
        restart_count: how often this node's agent has restarted its workers.
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
    """An environment variable's integer.

    Args:
        environ: the variables.
        name: the variable.
        default: what holds where it is not set or empty; None makes that an error.
        low: the least value.
        high: the greatest value.
        beside: variables of the same launcher; the error for a missing one shows those that are set.

    Raises:
        SettingError: the variable is missing, is no integer, or is out of range.
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
