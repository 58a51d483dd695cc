"""Paths that may be URLs: `pathlib.Path("s3://b/x")` would silently mean the local folder `s3:/b/x`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from instep.errors import MissingPackageError, SettingError
from instep.types import Location, PathLike
from instep.utils.imports import require

_LOCAL = ("file", "local")
_INSTALL = {"s3": "'instep[remote]'", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}


def local_path(value: PathLike) -> Path:
    """Return the local path that a user's text or object means, with a leading `~` expanded."""
    return Path(os.path.expanduser(value))


def to_path(value: Location, like: Any = None) -> Path:
    """Return the path that a text or an object means.

    Args:
        value: a path, a URL ("s3://bucket/run", "memory://run", "file:///data/run"), or a `upath.UPath`.
        like: a path whose options (endpoint, credentials) hold for a URL of the same protocol too.

    Returns:
        A `pathlib.Path` for what is on this machine (`~` is the home folder), else a `upath.UPath`, which has the same
        interface. Its listings are never cached: other processes write there too.

    Raises:
        MissingPackageError: a URL needs a package that is not installed.
        SettingError: it is neither, or nothing serves that protocol.

    Example:
        >>> to_path("file:///data/run"), to_path("runs/a")
        (PosixPath('/data/run'), PosixPath('runs/a'))
    """
    if "\0" in str(value):
        raise SettingError(f"{str(value)!r} has a null byte, which no path has", got=value)
    if isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        if parts.scheme in _LOCAL and parts.netloc in ("", "localhost"):
            return Path(unquote(parts.path))
    elif isinstance(value, (str, os.PathLike)):
        return local_path(value)
    elif not hasattr(value, "protocol"):  # `protocol`: only a UPath has this attribute
        raise SettingError(f"{value!r} is no path. Give a text, a pathlib.Path or a URL.", got=value)
    upath = require("upath", extra="remote", purpose=str(value))  # imported late, like fsspec: both are optional
    fsspec = require("fsspec", extra="remote", purpose=str(value))
    try:
        path = upath.UPath(value, use_listings_cache=False)
        fsspec.get_filesystem_class(path.protocol)
    except ImportError as error:
        install = _INSTALL.get(str(value).partition("://")[0], f"its fsspec package ({error})")
        raise MissingPackageError(
            f"{value} needs a package that is not installed. Run: pip install {install}"
        ) from error
    except ValueError as error:
        raise SettingError(f"{value}: {error}. Give a path, or a URL that fsspec knows.", got=value) from error
    if isinstance(like, upath.UPath) and like.protocol == path.protocol:
        path = upath.UPath(path, **like.storage_options)
    return cast("Path", path)
