"""Out-of-memory errors on any rank: all ranks learn of them, and no rank waits for a rank that has stopped.

A rank that runs out of memory in the middle of a step leaves the others waiting in a collective that it never enters.
Inside of `out_of_memory`, every collective (of the user, DDP, FSDP or DTensor) therefore begins only once all ranks
have reported that they are well. A rank that ran out of memory reports this in place of its next collective, and the
other ranks leave their step by an error. The memory of a collective is allocated before the report, so the collective
cannot run out of memory after the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from instep.distributed.objects import control_group
from instep.distributed.out_of_memory import is_out_of_memory
from instep.distributed.rank_zero import fail_together, from_every_rank
from instep.state.collective_checks import announce
from instep.state.messages import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_WELL, _SHORT, _FAILED = range(3)  # states that a rank reports of itself


def out_of_memory(function: Callable[[], Any], doing: str) -> str:
    """Call a function, and return whether memory ran out on any rank. Collective.

    Args:
        function: function that runs steps. If it raises an error on one rank, the other ranks leave it at their next
            collective.
        doing: description of the function, for errors on the other ranks.

    Returns:
        Text of the error, the same on all ranks; empty if the memory was sufficient.

    Raises:
        Exception: an error of another kind in the function; the other ranks raise RemoteError with its traceback.
    """
    group = control_group()
    turnstile = nullcontext() if group is None else _Turnstile(group)
    error: Exception | None = None
    told = False
    try:
        with turnstile:
            function()
    except _LeftElsewhere:
        told = True
    except Exception as caught:  # noqa: BLE001  told to all, and raised below unless it is about memory
        error = caught
    own = _WELL if error is None else _SHORT if is_out_of_memory(error) else _FAILED
    if not isinstance(turnstile, _Turnstile):
        if own == _FAILED:
            assert error is not None
            raise error
        return "" if error is None else f"{type(error).__name__}: {error}"
    verdict = turnstile.verdict if told else turnstile.say(own)
    if verdict == _WELL:
        return ""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    if verdict == _FAILED:
        fail_together(error if own == _FAILED else None, doing)
    return next((one for one in from_every_rank(text) if one), "out of memory")


class _LeftElsewhere(Exception):
    """Exception that ends this rank's steps at their next collective, because another rank's steps have failed."""


class _Turnstile(TorchDispatchMode):
    """Mode in which every collective waits until all ranks have reported that they are well.

    Args:
        group: process group for these reports.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.verdict = _WELL
        self._group = group
        self._speaks = False

    def say(self, state: int) -> int:
        """Report the state of this rank, and return the worst state of all ranks. Collective."""
        self._speaks = True
        try:
            announce(self._group, "out_of_memory", any_line=True)
            self.verdict = int(meet(self._group, "out_of_memory", (), [state]).max())
        finally:
            self._speaks = False
        return self.verdict

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        collective = func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__
        if collective and not self._speaks and self.say(_WELL) != _WELL:
            raise _LeftElsewhere
        return func(*args, **(kwargs or {}))
