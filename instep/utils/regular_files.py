"""Files that anybody may have put there: opened only where they are regular, and read only up to a size.

A pipe blocks who opens it until somebody writes, and a device may have no end. So what lies in a checkpoint, a run
folder or a folder of another trainer is opened here and nowhere else.
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

LEASE_BYTES = 2**16  # a lease, a status or a name: one kilobyte in practice
INDEX_BYTES = 64 * 2**20  # a manifest or an index: 100 bytes for each file or tensor, so several 100,000 of them
STATE_BYTES = 2**30  # JSON that a run has saved: what is large in a state are tensors, which are not in it

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path | str, follow: bool = True) -> FileIO:
    """Open a regular file to read its bytes, without waiting for anything.

    Args:
        path: of a local file system.
        follow: take the file that a symbolic link names, too.

    Raises:
        OSError: it cannot be opened, or is no regular file; the text says what it is.
    """
    _check(path, os.stat(path, follow_symlinks=follow))  # before it is opened: that alone may move a device
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    try:
        _check(path, os.fstat(fd))
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path | str, most: int, follow: bool = True) -> bytes:
    """The content of a regular file of limited size.

    Args:
        path: of a local file system.
        most: bytes that it may have.
        follow: as in `open_regular`.

    Raises:
        OSError: as in `open_regular`; or it has more bytes.
    """
    with open_regular(path, follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise too_large(path, size, most)
        data = file.read(size + 1) or b""
        while len(data) <= most and (more := file.read(2**20)):
            data += more
    if len(data) > most:
        raise too_large(path, len(data), most)
    return data


def too_large(path: object, size: int, most: int) -> OSError:
    """The error for a file of more bytes than a file of its kind ever has."""
    return OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read of such a file", str(path))


def _check(path: Path | str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, where a regular file is expected", str(path))
