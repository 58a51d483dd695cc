"""Files that only one user can read or change, and message authentication codes (MACs) made with a key in such a file.

That a file belongs to a user does not prove that the user wrote its content: the user may have downloaded or unpacked
the file. A MAC of the content does prove it, since only the user has the key. The key is made at the first use, in the
user's state folder.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.utils.atomic import create_exclusive
from instep.utils.untrusted_files import open_regular

_MOST_BYTES = 4096

_LEAST_BYTES = 32


def make_key(path: Path) -> None:
    """Create a file with a random key of 64 hexadecimal digits; keep the file if it exists already.

    If two processes do this at the same time, one of the keys is kept.

    Args:
        path: path of the file; the folder must exist.

    Raises:
        OSError: the file cannot be created.
    """
    if not path.exists():
        create_exclusive(path, secrets.token_hex(32).encode(), mode=0o600)


def read_private(path: Path) -> bytes:
    """Read the first 4096 bytes of a file that only this user or root can reach.

    Args:
        path: path of the file.

    Raises:
        PermissionError: other users can read or change the file.
        OSError: the file cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        if state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o077:
            mode = stat.S_IMODE(state.st_mode)
            text = f"others can read or change it (mode {mode:04o}, owner {state.st_uid})"
            raise PermissionError(errno.EACCES, text, str(path))
        return file.read(_MOST_BYTES) or b""


def mark(value: Any) -> str | None:
    """Compute this user's MAC of JSON values; return None if the user's key cannot be stored or read.

    Args:
        value: the JSON values.
    """
    key = _key(make=True)
    return None if key is None else _mac(key, value)


def is_own(value: Any, given: Any) -> bool:
    """Return True if a MAC of JSON values was made by this user.

    Args:
        value: the JSON values.
        given: the MAC that was stored with the values.
    """
    key = _key(make=False)
    return key is not None and isinstance(given, str) and hmac.compare_digest(_mac(key, value).encode(), given.encode())


class Seal:
    """Computes and checks this user's MACs for many pieces of data, and reads the key only once.

    Args:
        about: text that goes into every MAC, such as a name of what the data belong to. A MAC of the same data that was
            made with another text is wrong.
    """

    def __init__(self, about: str) -> None:
        self.about = about
        key = _key(make=True)
        # Keyed BLAKE2 is a MAC, and takes a quarter of the time of HMAC, which matters for the MACs of a full queue.
        self._begun = None if key is None else hashlib.blake2b(f"{about}\n".encode(), key=key[:64], digest_size=16)

    def mark(self, data: bytes) -> str:
        """Compute the MAC of a piece of data; return "" if the user's key cannot be stored or read."""
        if self._begun is None:
            return ""
        mark = self._begun.copy()
        mark.update(data)
        return mark.hexdigest()

    def is_own(self, data: bytes, given: str) -> bool:
        """Return True if a MAC of a piece of data was made by this user."""
        return self._begun is not None and hmac.compare_digest(self.mark(data).encode(), given.encode())


def _mac(key: bytes, value: Any) -> str:
    return hmac.new(key, json.dumps(value, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes | None:
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "instep" / "own.key"
    except RuntimeError:  # raised if the user has no home folder
        return None
    with suppress(OSError):
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_key(path)
        key = read_private(path)
        if len(key) >= _LEAST_BYTES:
            return key
    return None
