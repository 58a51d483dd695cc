"""Files that anybody may have written: opened only if they are regular, read only up to a size, parsed strictly.

Opening a pipe blocks until somebody writes, and reading a device may never end. So files of a checkpoint, a run folder
or another trainer's folder are opened only by this module. JSON is read strictly as the format defines it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

LEASE_BYTES = 2**16  # a lease, a status or a name; real ones have about one kilobyte
# a manifest or an index; 100 bytes for each file or tensor give room for several 100,000 of them
INDEX_BYTES = 64 * 2**20
STATE_BYTES = 2**30  # JSON that a run has saved; large parts of a state are tensors, which JSON does not hold

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)

MOST_DEPTH = 256  # nesting of containers; recursive code must not run out of stack


def open_regular(path: Path | str) -> FileIO:
    """Open a regular file to read its bytes, without waiting for anything.

    Args:
        path: of a local file system; a symbolic link stands for the file that it names.

    Raises:
        OSError: it cannot be opened, or is no regular file; the text says what it is.
    """
    _check(path, os.stat(path))  # checked before opening, since opening alone may make a device act
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(fd))
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path | str, most: int) -> bytes:
    """Read the content of a regular file of limited size.

    Args:
        path: of a local file system.
        most: bytes that it may have.

    Raises:
        OSError: as in `open_regular`; or it has more bytes.
    """
    with open_regular(path) as file:
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
    """Make the error for a file that is larger than any file of its kind."""
    return OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read of such a file", str(path))


def _check(path: Path | str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, where a regular file is expected", str(path))


def parse_json(text: bytes | bytearray | str) -> Any:
    """Parse a JSON text.

    Stricter than `json.loads`: UTF-8 only, no repeated key in an object, no NaN or Infinity, and at most 256 nested
    containers.

    Raises:
        ValueError: it is not such a text.

    Example:
        >>> parse_json(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
    """
    if not isinstance(text, str):
        text = bytes(text).decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(value)
    return value


def parse_object(text: bytes | bytearray | str) -> dict[str, Any]:
    """Parse a JSON text that holds one object.

    Raises:
        ValueError: it is not such a text, or holds something else.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, where an object is expected")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise _too_deep()
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer if type(outer) is list else ())
            if type(inner) is dict or type(inner) is list
        ]


def _too_deep() -> ValueError:
    return ValueError(f"more than {MOST_DEPTH} containers are within each other")


def clean(text: str, kept: str = "\n\t") -> str:
    """Escape control characters, so that a stranger's text cannot color, move or type on a terminal.

    Args:
        text: anybody's.
        kept: characters that stay although they are not printable.

    Example:
        >>> clean("loss\\x1b[31m")
        'loss\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode() for char in text
    )
