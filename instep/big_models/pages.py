"""Pages of mapped weights: whether they are in memory, and how they get there.

A page that the kernel has dropped comes back by itself when it is touched, a few kilobytes at a time. Asked for in
large pieces, the disk is read at its full speed, and the computation does not wait for it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor

_PAGE = mmap.PAGESIZE
_AT_ONCE = 64 * 2**20  # bytes: of cold files on a virtual disk 2.4 GB/s, where pieces of 8 MiB give 1.2
_LARGE = 4 * 2**20  # bytes of a tensor that is worth an own request
_WILLNEED, _HUGE, _POPULATE = 3, 14, 22  # numbers of madvise's advice on Linux; the first is the same on macOS


def in_memory(tensor: Tensor) -> bool:
    """Return whether all pages of a tensor are in memory; False where that cannot be known.

    Args:
        tensor: contiguous, on the CPU.
    """
    begin, size = _span(tensor)
    return _are_there(begin, size)


def _are_there(begin: int, size: int) -> bool:
    if size == 0 or not sys.platform.startswith("linux"):
        return size == 0
    found = (ctypes.c_ubyte * (size // _PAGE))()
    return _libc().mincore(begin, size, found) == 0 and 0 not in bytes(found)


def read_ahead(tensors: Iterable[Tensor]) -> None:
    """Read the pages of tensors into memory, and wait for them; other threads of the interpreter go on.

    Args:
        tensors: contiguous, on the CPU, over mapped files; neighbors are read together.
    """
    pieces = [
        (at, min(_AT_ONCE, end - at))
        for begin, end in _joined(tensors)
        for at in range(begin, end, _AT_ONCE)
        # Asking for pages that are in memory takes as long as reading them.
        if not _are_there(at, min(_AT_ONCE, end - at))
    ]
    for number, (at, size) in enumerate(pieces):
        for later, length in pieces[
            number + (number > 0) : number + 2
        ]:  # the requests for the next piece go out before this one is waited for
            _libc().madvise(later, length, _WILLNEED)
        if _libc().madvise(at, size, _POPULATE) != 0:  # a kernel before Linux 5.14, or of another system
            sum(memoryview((ctypes.c_char * size).from_address(at)).cast("B")[::_PAGE])


def will_need(tensors: Iterable[Tensor]) -> None:
    """Ask for the pages of tensors, and do not wait."""
    for begin, end in _joined(tensors):
        for at in range(begin, end, _AT_ONCE):
            if not _are_there(at, min(_AT_ONCE, end - at)):
                _libc().madvise(at, min(_AT_ONCE, end - at), _WILLNEED)


def _joined(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the address ranges of tensors, with neighboring ranges joined."""
    joined: list[tuple[int, int]] = []
    for begin, size in sorted(map(_span, tensors)):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], begin + size)
        elif size:
            joined.append((begin, begin + size))
    return joined


def prefer_huge(tensor: Tensor) -> Tensor:
    """Ask for large pages for a tensor's fresh memory, for 512 times fewer page faults; return the tensor."""
    begin, size = _span(tensor)
    if sys.platform.startswith("linux") and size >= _LARGE:
        _libc().madvise(begin, size, _HUGE)
    return tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return address and bytes of the pages that a tensor lies on."""
    begin = tensor.data_ptr() // _PAGE * _PAGE
    end = tensor.data_ptr() + tensor.nbytes
    return begin, -(-(end - begin) // _PAGE) * _PAGE if tensor.nbytes else 0


@cache
def _libc() -> Any:
    # Ctypes releases the interpreter's lock during a call, mmap.madvise does not.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if hasattr(libc, "mincore"):
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc
