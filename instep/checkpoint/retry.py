"""Which faults pass by themselves, and how long to wait for that: for a save, and for reading."""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES_S = (0.5, 2.0)  # one more try after each
sleep = time.sleep  # tests put their own here

_PASSING_NAMES = (
    *("EAGAIN", "EBUSY", "EINTR", "EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT", "EPIPE"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
)
_PASSING = {getattr(errno, name) for name in _PASSING_NAMES if hasattr(errno, name)}


def passing(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is one that may not come again: a network's or a server's short fault."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)):
            return True
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__
    return False


def wait(pause_s: float, what: str) -> None:
    """Say that something is tried again, and wait before it is."""
    warnings.warn(what, stacklevel=3)
    sleep(pause_s)


def patiently(read: Callable[[], T]) -> T:
    """What `read()` returns; called again where it fails in passing."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except OSError as error:
            if not passing(error):
                raise
            wait(pause_s, f"reading failed for now, and is tried again: {error}")
    return read()
