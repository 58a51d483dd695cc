"""Deciding on rank 0 for all ranks: the disk is read by one process and every rank acts on what that one saw.

With one process nothing here touches the process state: reading a checkpoint in a script must not choose a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from instep.distributed import broadcast_object, gather_object, raise_together
from instep.state import PartialState, process, read_environment

T = TypeVar("T")


def place() -> tuple[int, int]:
    """This process's rank, and the world size."""
    if not process.is_held() and read_environment().world_size == 1:
        return 0, 1
    state = PartialState()
    return state.process_index, state.num_processes


def from_every_rank(value: T) -> list[T]:
    """Every rank's value, in rank order. Collective."""
    return [value] if place()[1] == 1 else gather_object(value)


def fail_together(error: BaseException | None, doing: str) -> None:
    """Raise on every rank where any rank has an error: its own, or RemoteError. Collective."""
    if place()[1] > 1:
        raise_together(error, doing)
    elif error is not None:
        raise error


def on_rank_zero(decide: Callable[[], T], doing: str) -> T:
    """What `decide()` returns on rank 0, on every rank. Collective.

    Args:
        decide: called on rank 0 only.
        doing: names the work, for the errors of the other ranks.

    Raises:
        BaseException: what `decide` raised, on rank 0; RemoteError with its traceback on the others.
    """
    rank, world_size = place()
    if world_size == 1:
        return decide()
    value: T | None = None
    error: BaseException | None = None
    if rank == 0:
        try:
            value = decide()
        except BaseException as caught:  # noqa: BLE001  raised again below, together with the other ranks
            error = caught
    value, failed = broadcast_object((value, error is not None))
    if failed:
        raise_together(error, doing)
    return value  # pyright: ignore[reportReturnType]
