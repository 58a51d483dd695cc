"""Keys and secrets of one user: files that others can neither read nor change."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from instep.utils.regular_files import open_regular
from instep.utils.small_files import create_exclusive

_MOST_BYTES = 4096


def make_key(path: Path) -> None:
    """Make a file with a random key, 64 hexadecimal digits; where it exists, also by another process by now, it stays.

    Args:
        path: of the file, in a folder that exists.

    Raises:
        OSError: it cannot be made.
    """
    if not path.exists():
        create_exclusive(path, secrets.token_hex(32).encode(), mode=0o600)


def read_private(path: Path) -> bytes:
    """The first 4096 bytes of a file that this user or root owns and others cannot reach.

    Args:
        path: of the file.

    Raises:
        PermissionError: others can read or change it.
        OSError: it cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o077:
            mode = stat.S_IMODE(state.st_mode)
            text = f"others can read or change it (mode {mode:04o}, owner {state.st_uid})"
            raise PermissionError(errno.EACCES, text, str(path))
        return file.read(_MOST_BYTES) or b""
