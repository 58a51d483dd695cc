"""Decisions of rank 0 for all ranks, and errors of one rank that every rank raises.

One process reads the disk, and every rank acts on the result.

With one process, nothing here creates the process state, since reading a checkpoint in a script must not choose a
device.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import destroy_process_group, new_group

from instep.errors import DistributedError
from instep.state import PartialState, process, read_environment
from instep.state.messages import exchange, share_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class RankGroup:
    """The ranks that act on a folder together.

    Args:
        group: a gloo group of all ranks that nothing else uses, for a thread beside the training: its messages never
            pair with those of the training, and checked mode does not see them. None: the control group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._given_up = False

    @classmethod
    def apart(cls) -> RankGroup:
        """Make a second group of all ranks for these messages. Collective; `close` ends it."""
        groups = process.held().groups if process.is_held() else None
        group: Any = None if groups is None else new_group(backend="gloo", timeout=groups.timeout)
        return cls(group)

    def close(self, abort: bool = False) -> None:
        """Discard the group that `apart` made.

        Args:
            abort: end what a thread still does with it, by an error. What it says later is an error in any case: over
                another group it would be taken for an answer to something else.
        """
        if self._group is not None and not self._given_up:
            self._given_up = True
            if abort:
                self._group.abort()
            destroy_process_group(self._group)

    def rank_and_size(self) -> tuple[int, int]:
        """Return this process's rank, and the world size."""
        if self._group is not None:
            return self._group.rank(), self._group.size()
        if not process.is_held() and read_environment().world_size == 1:
            return 0, 1
        state = PartialState()
        return state.process_index, state.num_processes

    def from_every_rank(self, value: T) -> list[T]:
        """Return all ranks' values, in rank order, on every rank. Collective."""
        return exchange(value, self._messages())

    def fail_together(self, error: BaseException | None, doing: str) -> None:
        """Raise on every rank if any rank has an error: that rank's own, RemoteError on the others. Collective."""
        share_error(error, doing, self._messages())

    def together(self, doing: str) -> Together:
        """Run a `with` block; an error on any rank is raised on every rank at the block's end.

        Collective at that point.

        The block itself must not wait for another rank, since a rank that failed no longer answers.

        Args:
            doing: names the work, for the errors of the other ranks.

        Raises:
            Exception: the block's own error; on the other ranks RemoteError with its traceback.

        Example:
            >>> with RankGroup().together("reading the file"):
            ...     value = 3
        """
        return Together(self, doing)

    def on_rank_zero(self, decide: Callable[[], T], doing: str) -> T:
        """Call `decide` on rank 0 and return its result on every rank. Collective.

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
        """Return the group that messages go over; None for a process alone."""
        if self._given_up:
            raise DistributedError("this process has given this save up, so it says nothing more of it")
        if self.rank_and_size()[1] == 1:
            return None
        return PartialState().control_group if self._group is None else self._group


class Together:
    """A block of `RankGroup.together`; a class, so that checked mode finds the caller's line above it."""

    def __init__(self, ranks: RankGroup, doing: str) -> None:
        self._ranks, self._doing = ranks, doing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # this process is about to end
        try:
            self._ranks.fail_together(error, self._doing)
        except BaseException as raised:
            if raised is not error:  # if it is the block's own error, Python raises it anyway
                raise


_all = RankGroup()
from_every_rank, fail_together, on_rank_zero = _all.from_every_rank, _all.fail_together, _all.on_rank_zero
together = _all.together
