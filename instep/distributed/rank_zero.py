"""Deciding on rank 0 for all ranks: the disk is read by one process and every rank acts on what that one saw.

With one process nothing here touches the process state: reading a checkpoint in a script must not choose a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import destroy_process_group, new_group

from instep.errors import DistributedError
from instep.state import PartialState, process, read_environment
from instep.state.messages import exchange, share_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Peers:
    """The ranks that act on a folder together.

    Args:
        group: a gloo group of all ranks that nothing else uses, for a thread beside the training: its messages never
            pair with those of the training, and checked mode does not see them. None: the control group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._given_up = False

    @classmethod
    def apart(cls) -> Peers:
        """The same ranks, with a group of their own. Collective; `close` it."""
        groups = process.held().groups if process.is_held() else None
        group: Any = None if groups is None else new_group(backend="gloo", timeout=groups.timeout)
        return cls(group)

    def close(self, abort: bool = False) -> None:
        """Give up the group of `apart`.

        Args:
            abort: end what a thread still does with it, by an error. What it says later is an error in any case: over
                another group it would be taken for an answer to something else.
        """
        if self._group is not None and not self._given_up:
            self._given_up = True
            if abort:
                self._group.abort()
            destroy_process_group(self._group)

    def place(self) -> tuple[int, int]:
        """This process's rank, and the world size."""
        if self._group is not None:
            return self._group.rank(), self._group.size()
        if not process.is_held() and read_environment().world_size == 1:
            return 0, 1
        state = PartialState()
        return state.process_index, state.num_processes

    def from_every_rank(self, value: T) -> list[T]:
        """Every rank's value, in rank order. Collective."""
        return exchange(value, self._messages())

    def fail_together(self, error: BaseException | None, doing: str) -> None:
        """Raise on every rank where any rank has an error: its own, or RemoteError. Collective."""
        share_error(error, doing, self._messages())

    def on_rank_zero(self, decide: Callable[[], T], doing: str) -> T:
        """What `decide()` returns on rank 0, on every rank. Collective.

        Args:
            decide: called on rank 0 only.
            doing: names the work, for the errors of the other ranks.

        Raises:
            BaseException: what `decide` raised, on rank 0; RemoteError with its traceback on the others.
        """
        group = self._messages()
        if group is None:
            return decide()
        value: T | None = None
        error: BaseException | None = None
        if group.rank() == 0:
            try:
                value = decide()
            except BaseException as caught:  # noqa: BLE001  raised again below, together with the other ranks
                error = caught
        value, failed = exchange((value, error is not None), group, "on_rank_zero")[0]
        if failed:
            share_error(error, doing, group)
        return value  # pyright: ignore[reportReturnType]

    def _messages(self) -> ProcessGroup | None:
        """The group that messages go over; None for a process alone."""
        if self._given_up:
            raise DistributedError("this process has given this save up, so it says nothing more of it")
        if self.place()[1] == 1:
            return None
        return PartialState().control_group if self._group is None else self._group


_peers = Peers()
from_every_rank, fail_together, on_rank_zero = _peers.from_every_rank, _peers.fail_together, _peers.on_rank_zero
