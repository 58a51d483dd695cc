"""Read files that anybody may have written: only regular files, only up to a limit of size, and parsed strictly.

Opening a pipe blocks until another process writes to it, and reading a device may never end. So all files in a
checkpoint, in a run folder or in another trainer's folder are opened with the functions of this module. JSON is parsed
strictly, as its standard defines it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

LEASE_BYTES = 2**16  # limit for a file with a lease, a status or a name, which usually has about one kilobyte
# limit for a manifest or index file; an entry has about 100 bytes, so several 100,000 files or tensors have room
INDEX_BYTES = 64 * 2**20
STATE_BYTES = 2**30  # limit for the JSON part of a saved state; large values are tensors, which are saved elsewhere

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)

MOST_DEPTH = 256  # limit for the nesting of containers, so that recursive code does not run out of stack


def open_regular(path: Path | str) -> FileIO:
    """Open a regular file for reading bytes; never block, as opening a pipe would.

    Args:
        path: path of the file on a local file system; symbolic links are followed.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; the message says what it is.
    """
    _check(path, os.stat(path))  # check the file before opening it, since opening a device may already have an effect
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(fd))
        return FileIO(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path | str, most: int) -> bytes:
    """Read a regular file of limited size.

    Args:
        path: path of the file on a local file system.
        most: largest allowed size in bytes.

    Raises:
        OSError: the file is larger, cannot be read, or is not a regular file.
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
    """Return the error for a file that is larger than its limit."""
    return OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read of such a file", str(path))


def _check(path: Path | str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, where a regular file is expected", str(path))


def parse_json(text: bytes | bytearray | str) -> Any:
    """Parse JSON strictly.

    Unlike `json.loads`, this function accepts only UTF-8, no repeated keys in an object, no NaN or Infinity, and at
    most 256 nested containers.

    Raises:
        ValueError: the text is not JSON of this kind.

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
    """Parse JSON whose value is an object, as strictly as `parse_json`.

    Raises:
        ValueError: the text is not JSON of this kind, or its value is not an object.
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
    """Escape control characters, so that a text from an untrusted source cannot control a terminal.

    Args:
        text: text from any source.
        kept: characters that are not escaped, although they are not printable.

    Example:
        >>> clean("loss\\x1b[31m")
        'loss\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode() for char in text
    )
