"""Who the launcher says this process is. The only place that reads RANK, WORLD_SIZE and their kin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from instep.errors import SettingError

Launcher = Literal["none", "torchrun"]


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


def read_environment(environ: Mapping[str, str] | None = None) -> ProcessEnvironment:
    """Read the launcher's variables.

    torchrun's variables are understood, also when another program sets them by hand: `RANK`, `WORLD_SIZE` and
    `LOCAL_RANK` are needed for more than one process, the rest follows for one node. Without `RANK` and `WORLD_SIZE`
    the process is alone.

    Args:
        environ: the variables; `os.environ` by default.

    Returns:
        The process's place. Nothing is written back.

    Raises:
        SettingError: a variable is missing, is no number, is out of range, or contradicts another.

    Example:
        >>> read_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}).rank
        1
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and _number(environ, "WORLD_SIZE", 1) == 1:
        return ProcessEnvironment()
    world_size = _number(environ, "WORLD_SIZE", None, low=1)
    rank = _number(environ, "RANK", None, high=world_size - 1)
    num_nodes = _number(environ, "GROUP_WORLD_SIZE", 1, low=1, high=world_size)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size if num_nodes == 1 else None, 1, world_size)
    if num_nodes == 1 and local_world_size < world_size:
        # torchrun always sets GROUP_WORLD_SIZE; whoever does not, but has fewer processes here than in all, has
        # nodes of equal size.
        num_nodes = -(-world_size // local_world_size)
    local_rank = _number(environ, "LOCAL_RANK", 0 if world_size == 1 else None, high=local_world_size - 1)
    return ProcessEnvironment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK", rank // local_world_size, high=num_nodes - 1),
        num_nodes=num_nodes,
        launcher="torchrun",
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def read_debug(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `INSTEP_DEBUG` asks for checked collectives."""
    value = (os.environ if environ is None else environ).get("INSTEP_DEBUG", "0").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise SettingError(f"INSTEP_DEBUG={value!r} is not a switch: set it to 1 or 0", field="INSTEP_DEBUG", got=value)


def _number(environ: Mapping[str, str], name: str, default: int | None, low: int = 0, high: int | None = None) -> int:
    text = environ.get(name)
    if text is None or text == "":
        if default is None:
            known = ", ".join(f"{key}={environ[key]}" for key in _NAMES if key in environ)
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


_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
