"""Running out of memory on any rank: found out by all of them, and no rank waits for one that has given up.

A rank that runs out of memory in the middle of a step leaves the others in a collective that it never enters. Inside of
`out_of_memory` each collective of the code, the user's as well as DDP's, FSDP's and DTensor's, is therefore begun only
once all ranks have said that they are well: a rank that is not says so in the same place, and the others leave their
step by an error there. What a collective needs is allocated before that, so that it can fail no more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instep.distributed.objects import control_group
from instep.distributed.rank_zero import fail_together, from_every_rank
from instep.state import DEVICE_KINDS
from instep.state.collective_checks import announce
from instep.state.messages import meet

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Allocators without an exception class of their own, and what a remote or chained error says of those that have one.
_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, XPU, MPS, NPU
    "OutOfMemoryError",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN says when its workspace does not fit
)
_WELL, _SHORT, _FAILED = range(3)  # what a rank says of itself


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a device or host, here or on the rank it came from.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError):
            text = str(seen)
            if any(mark in text for mark in _OUT_OF_MEMORY) or "\nMemoryError" in text:
                return True
        seen = seen.__cause__
    return False


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the memory that torch caches back to the accelerator. Do nothing without an accelerator.

    Args:
        garbage_collection: collect reference cycles first, which may hold tensors.

    Example:
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for name in ("cuda", "xpu", "npu", "mps"):
        if DEVICE_KINDS[name].count():
            getattr(torch, name).empty_cache()


def out_of_memory(function: Callable[[], Any], doing: str) -> str:
    """Call a function, and find out whether memory ran out meanwhile on any rank. Collective.

    Args:
        function: runs steps. Where it is left by an error, on any rank, the others leave it too.
        doing: names it, for the errors of the other ranks.

    Returns:
        The error's text, the same on all ranks; empty where memory sufficed.

    Raises:
        Exception: the function's own error of another kind; on the other ranks RemoteError with its traceback.
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
    """Another rank has left the function: this one leaves it too, at the same collective."""


class _Turnstile(TorchDispatchMode):
    """A mode in which every collective waits until all ranks have said that they are well.

    Args:
        group: over which they say it.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.verdict = _WELL
        self._group = group
        self._speaks = False

    def say(self, state: int) -> int:
        """Say how this rank is, and return the worst that any rank says. Collective."""
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
