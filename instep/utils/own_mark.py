"""A mark that what was saved is this user's own: a MAC by a key that only this user can read.

A stranger's files may be owned by this user (unpacked, downloaded), so an owner proves nothing. The key is made at the
first use, in the user's state folder.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.utils.private_files import make_key, read_private

_LEAST_BYTES = 32


def mark(value: Any) -> str | None:
    """The mark of JSON values; None where no key can be kept.

    Args:
        value: what is marked.
    """
    key = _key(make=True)
    return None if key is None else _mac(key, value)


def is_own(value: Any, given: Any) -> bool:
    """Whether this user made a mark, of these values.

    Args:
        value: what was marked.
        given: the mark that stands beside it.
    """
    key = _key(make=False)
    return key is not None and isinstance(given, str) and hmac.compare_digest(_mac(key, value).encode(), given.encode())


def _mac(key: bytes, value: Any) -> str:
    return hmac.new(key, json.dumps(value, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes | None:
    try:
        path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "instep" / "own.key"
    except RuntimeError:  # a user without a home
        return None
    with suppress(OSError):
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_key(path)
        key = read_private(path)
        if len(key) >= _LEAST_BYTES:
            return key
    return None
