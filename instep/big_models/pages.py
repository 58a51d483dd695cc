"""Pages of mapped weights: whether they are in memory, and how to load them.

If the kernel has dropped a page, the next access loads it again, but only a few kilobytes at a time. Requests for large
pieces use the disk's full speed, and the computation does not wait.
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
# Number of bytes in a request. With this size, files that are not in memory are read from a virtual disk at 2.4 GB/s,
# but only at 1.2 GB/s in pieces of 8 MiB.
_AT_ONCE = 64 * 2**20
_LARGE = 4 * 2**20  # minimum number of bytes of a tensor that gets its own request
_WILLNEED, _HUGE, _POPULATE = 3, 14, 22  # codes of madvise's advice on Linux; the first is the same on macOS


def in_memory(tensor: Tensor) -> bool:
    """Return whether all pages of a tensor are in memory; False if that is unknown.

    Args:
        tensor: a contiguous tensor on the CPU.
    """
    begin, size = _span(tensor)
    return _are_there(begin, size)


def _are_there(begin: int, size: int) -> bool:
    if size == 0 or not sys.platform.startswith("linux"):
        return size == 0
    found = (ctypes.c_ubyte * (size // _PAGE))()
    return _libc().mincore(begin, size, found) == 0 and 0 not in bytes(found)


def read_ahead(tensors: Iterable[Tensor]) -> None:
    """Read the pages of tensors into memory and wait; other Python threads continue.

    Args:
        tensors: contiguous tensors on the CPU, mapped from files; neighbors in a file are read together.
    """
    pieces = [
        (at, min(_AT_ONCE, end - at))
        for begin, end in _joined(tensors)
        for at in range(begin, end, _AT_ONCE)
        # No request is made for pages that are in memory already, since it would take as long as reading them.
        if not _are_there(at, min(_AT_ONCE, end - at))
    ]
    for number, (at, size) in enumerate(pieces):
        for later, length in pieces[
            number + (number > 0) : number + 2
        ]:  # request the next piece before waiting for this one
            _libc().madvise(later, length, _WILLNEED)
        # Linux before 5.14 and other systems do not know _POPULATE: there, each page is loaded by reading a byte of it.
        if _libc().madvise(at, size, _POPULATE) != 0:
            sum(memoryview((ctypes.c_char * size).from_address(at)).cast("B")[::_PAGE])


def will_need(tensors: Iterable[Tensor]) -> None:
    """Request the pages of tensors without waiting."""
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
    """Request large pages for a tensor's new memory, for 512 times fewer page faults; return the tensor."""
    begin, size = _span(tensor)
    if sys.platform.startswith("linux") and size >= _LARGE:
        _libc().madvise(begin, size, _HUGE)
    return tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return address and size in bytes of the pages of a tensor."""
    begin = tensor.data_ptr() // _PAGE * _PAGE
    end = tensor.data_ptr() + tensor.nbytes
    return begin, -(-(end - begin) // _PAGE) * _PAGE if tensor.nbytes else 0


@cache
def _libc() -> Any:
    # ctypes releases the interpreter's lock during a call; mmap.madvise does not.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if hasattr(libc, "mincore"):
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc
