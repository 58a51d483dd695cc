"""`RankGroup`: rank 0 decides for all ranks, and an error of one rank is raised on every rank.

It is used where one process reads the disk and every rank acts on the result.

With one process, no function of this file creates a PartialState, since reading a checkpoint in a script must not
choose a device.
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
    """Group of ranks that act together, such as on a checkpoint folder.

    Args:
        group: gloo group of all ranks that only this object uses, for a thread beside the training: its messages never
            get mixed up with those of the training, and checked mode does not compare them. None for the control group.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self._given_up = False

    @classmethod
    def apart(cls) -> RankGroup:
        """Make a `RankGroup` with a process group of its own. Collective; `close` destroys the process group."""
        groups = process.held().groups if process.is_held() else None
        group: Any = None if groups is None else new_group(backend="gloo", timeout=groups.timeout)
        return cls(group)

    def close(self, abort: bool = False) -> None:
        """Destroy the process group that `apart` created.

        Afterwards every method that sends messages raises an error. It must not use the control group instead, where
        the other ranks would take the message for an answer to something else.

        Args:
            abort: whether to end pending operations in the group, in any thread, by an error.
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
        """Return the values of all ranks, in rank order, on every rank. Collective."""
        return exchange(value, self._messages())

    def fail_together(self, error: BaseException | None, doing: str) -> None:
        """Raise on every rank if any rank has an error: its own error there, RemoteError on the others. Collective."""
        share_error(error, doing, self._messages())

    def together(self, doing: str) -> Together:
        """Return a context manager. An error in its block on any rank is raised on every rank at the block's end.

        The end of the block is a collective.

        The block itself must not wait for another rank, since a rank that failed no longer answers.

        Args:
            doing: description of the work, for the errors on other ranks.

        Raises:
            Exception: the block's own error; on the other ranks, RemoteError with the traceback of this error.

        Example:
            >>> with RankGroup().together("reading the file"):
            ...     value = 3
        """
        return Together(self, doing)

    def on_rank_zero(self, decide: Callable[[], T], doing: str) -> T:
        """Call `decide` on rank 0 and return its result on every rank. Collective.

        Args:
            decide: function that is called on rank 0 only.
            doing: description of the work, for the errors on other ranks.

        Raises:
            BaseException: on rank 0, the error of `decide`; on the other ranks, RemoteError with the traceback of this
                error.
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
        """Return the process group for messages; None for a single process."""
        if self._given_up:
            raise DistributedError("this process has given this save up, so it says nothing more of it")
        if self.rank_and_size()[1] == 1:
            return None
        return PartialState().control_group if self._group is None else self._group


class Together:
    """Context manager of `RankGroup.together`.

    It is a class, and not a generator, so that checked mode finds the caller's line.
    """

    def __init__(self, ranks: RankGroup, doing: str) -> None:
        self._ranks, self._doing = ranks, doing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # KeyboardInterrupt or SystemExit: this process is about to end
        try:
            self._ranks.fail_together(error, self._doing)
        except BaseException as raised:
            if raised is not error:  # another error than the block's own, which Python itself raises
                raise


_all = RankGroup()
from_every_rank, fail_together, on_rank_zero = _all.from_every_rank, _all.fail_together, _all.on_rank_zero
together = _all.together
