"""What ranks tell each other before a collective: that they do the same to alike tensors, and sizes that may differ.

One message of 128 bytes per rank over the control group: torch itself gives wrong results or hangs when ranks disagree.
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.errors import SettingError
from instep.state import PartialState
from instep.state.checked import announce
from instep.state.meeting import meet


def agree(operation: str, described: Sequence[str], sizes: Sequence[int] = ()) -> list[list[int]]:
    """Make sure that all ranks are about to do the same, and exchange sizes. A collective.

    Args:
        operation: what this rank is about to do.
        described: what must be the same on all ranks; one line per tensor.
        sizes: what may differ; as many on every rank as there are lines, or none on any.

    Returns:
        Every rank's sizes, in rank order.

    Raises:
        DistributedError: on every rank, if any two disagree; the text says in what.
    """
    state = PartialState()
    group = state.control_group
    if group is None:
        return [list(sizes)]
    announce(group, operation, ", ".join(described))
    return meet(group, operation, described, sizes).tolist()


def check_rank(from_process: int) -> None:
    """Refuse a rank that the job does not have; a process alone takes every one."""
    world = PartialState().num_processes
    if world > 1 and not 0 <= from_process < world:
        raise SettingError(
            f"from_process={from_process}: the job has {world} processes, from 0 to {world - 1}",
            field="from_process",
            got=from_process,
        )
