"""Convert text to paths, also URLs such as "s3://b/x", which `pathlib.Path` would take for a local folder."""

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
    """Convert a text or path object to a local path, with a leading `~` replaced by the home folder."""
    return Path(os.path.expanduser(value))


def to_path(value: Location, like: Any = None) -> Path:
    """Convert a path or URL to a path object.

    Args:
        value: a path, a URL ("s3://bucket/run", "memory://run", "file:///data/run"), or a `upath.UPath`.
        like: a path whose options (endpoint, credentials) are used for a URL of the same protocol too.

    Returns:
        A `pathlib.Path` for a local path (`~` is the home folder), else a `upath.UPath`, which has the same interface.
        Its listings are not cached, since other processes may write to the same place.

    Raises:
        MissingPackageError: the URL needs a package that is not installed.
        SettingError: the value is not a path or URL, or the protocol of the URL is not supported.

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
    elif not hasattr(value, "protocol"):  # only a UPath has this attribute
        raise SettingError(f"{value!r} is no path. Give a text, a pathlib.Path or a URL.", got=value)
    upath = require("upath", extra="remote", purpose=str(value))  # imported late: optional, as is fsspec
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
