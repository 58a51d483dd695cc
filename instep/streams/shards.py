"""Find the shards of a stream (local or remote files of records), and copy those that cannot be read in place."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from instep.checkpoint.files import patiently
from instep.errors import DataError, SettingError
from instep.utils.atomic import replacing
from instep.utils.imports import require

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".tar": "tar",
    ".txt": "text",
}
FORMATS = tuple(dict.fromkeys(_SUFFIXES.values()))
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
Result = TypeVar("Result")
AT_ONCE = 16  # number of shards that are inspected or counted at the same time


@dataclass(frozen=True)
class Shard:
    """A file of records, with its format, its size, and a text that changes when the file changes.

    Attributes:
        url: path or URL of the file, as the user wrote it.
        format: one of `FORMATS`.
        size: bytes of the file.
        stamp: text that changes when the file changes: the time of change, or the ETag of an object.
    """

    url: str
    format: str
    size: int
    stamp: str

    @property
    def key(self) -> str:
        """Key of stored data about this file in its present state."""
        return hashlib.sha256("\n".join((self.url, str(self.size), self.stamp)).encode()).hexdigest()[:32]

    @property
    def is_local(self) -> bool:
        """Whether the file is read in place, without a copy."""
        return not (_is_remote(self.url) or self.url.endswith(_COMPRESSED))


def find_shards(
    shards: str | os.PathLike[str] | Iterable[Any], format: str | None, options: Mapping[str, Any]
) -> list[Shard]:
    """Find the size and stamp of each file.

    Args:
        shards: a path or URL, or several; a path with `*`, `?` or `[` means all files that match it, sorted.
        format: format of all files; None: each file's suffix tells its format.
        options: options for the file system of fsspec.

    Raises:
        DataError: a file is missing, or is not a regular file; the message has its name.
        SettingError: there is no file, a file is named twice, or the format of a file is not known.
    """
    given = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    urls = [url for each in given for url in _expanded(os.fspath(each), options)]
    if not urls:
        raise SettingError("shards: expected at least one file, got none", field="shards", got=shards)
    twice = next((url for url in urls if urls.count(url) > 1), None) if len(set(urls)) < len(urls) else None
    if twice is not None:
        raise SettingError(f"shards: {twice} is there twice. Name each file once", field="shards", got=twice)
    formats = [format or _format_of(url) for url in urls]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda url, kind: Shard(url, kind, *_looked_at(url, options)), urls, formats))


def check_unchanged(shard: Shard) -> None:
    """Raise if a local file has changed since it was counted."""
    if not shard.is_local:
        return  # no check needed, since only this process writes the copy that is read
    size, stamp = _looked_at(shard.url, {})
    if (size, stamp) != (shard.size, shard.stamp):
        raise DataError(
            f"{shard.url} was changed during the run: it had {shard.size:,} bytes and has {size:,} now. Do not change "
            "shards that are read: write new data to new files, and build the data set anew with them"
        )


def local_copy(shard: Shard, folder: Path, options: Mapping[str, Any]) -> Path:
    """Return the local path of a shard; a remote or compressed shard is first copied into `folder`.

    Raises:
        DataError: the shard cannot be fetched in three attempts, or has changed since it was counted.
    """
    if shard.is_local:
        return Path(_plain(shard.url))
    path = folder / shard.key
    if path.exists():
        return path
    with _naming(f"the shard {shard.url} cannot be fetched"):
        folder.mkdir(parents=True, exist_ok=True)
        attempted(lambda: _fetch(shard, path, options))
    return path


def attempted(read: Callable[[], Result]) -> Result:
    """Call `read`, which reads from a remote file system, up to three times.

    Errors of all classes but FileNotFoundError, ImportError and DataError lead to another attempt, since file systems
    raise errors of their own, such as those of aiohttp.
    """
    return patiently(read, lambda error: not isinstance(error, (FileNotFoundError, ImportError, DataError)))


class _ReadFailed(Exception):
    """Error of a shard that could not be read to its end; another attempt may succeed. The message names the byte."""


def _fetch(shard: Shard, path: Path, options: Mapping[str, Any]) -> None:
    if _looked_at(shard.url, options) != (shard.size, shard.stamp):
        raise DataError("it was changed since it was counted. Build the data set anew")
    try:
        with replacing(path, sync=False) as part, open(part, "wb") as copy:
            copy.writelines(_pieces(shard, options))
    except OSError as error:  # an error of this machine's disk, since `_pieces` raises no OSError
        raise DataError(f"its copy in {path.parent} cannot be written: {error}. Make room, or change cache=") from error


def _pieces(shard: Shard, options: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the content of a remote or compressed file in pieces."""
    fsspec = require("fsspec", extra="data", purpose=f"reading {shard.url}")
    compression = "infer" if shard.url.endswith(_COMPRESSED) else None
    options = options if _is_remote(shard.url) else {}
    done = 0
    try:
        with fsspec.open(shard.url, "rb", compression=compression, **options) as file:
            while piece := file.read(2**20):
                done += len(piece)
                yield piece
    except ImportError:
        raise
    except FileNotFoundError as error:
        raise DataError("it is missing. Check the path") from error
    except Exception as error:  # any class, since each file system of fsspec has its own
        raise _ReadFailed(f"reading failed at byte {done:,}: {error}") from error
    if compression is None and done != shard.size:
        raise _ReadFailed(f"reading ended at byte {done:,} of {shard.size:,}")


def _expanded(url: str, options: Mapping[str, Any]) -> list[str]:
    if not glob.has_magic(url):
        return [url]
    if not _is_remote(url):
        found = sorted(glob.glob(_plain(url), recursive=True))
    else:
        found = _listed(url, options)
    if not found:
        raise DataError(f"no file fits {url}. Check the path")
    return found


def _listed(url: str, options: Mapping[str, Any]) -> list[str]:
    """Return the URLs of remote files that match a pattern with `*`."""
    fsspec = require("fsspec", extra="data", purpose=f"reading {url}")
    with _naming(f"the files of {url} cannot be listed"):
        system, path = fsspec.core.url_to_fs(url, **options)
        return [system.unstrip_protocol(each) for each in sorted(attempted(lambda: system.glob(path)))]


def _looked_at(url: str, options: Mapping[str, Any]) -> tuple[int, str]:
    """Return the size and the stamp of a file."""
    with _naming(f"the shard {url} cannot be read"):
        if not _is_remote(url):
            status = os.stat(_plain(url))
            if not stat.S_ISREG(status.st_mode):
                raise OSError("it is no regular file")
            return status.st_size, str(status.st_mtime_ns)
        fsspec = require("fsspec", extra="data", purpose=f"reading {url}")
        system, path = fsspec.core.url_to_fs(url, **options)
        facts = attempted(lambda: system.info(path))
        return int(facts["size"]), next((str(facts[name]) for name in _STAMPS if facts.get(name)), "")


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Add a text about the failed action to errors in the `with` block."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # any class, since each file system of fsspec has its own
        why = "it is missing. Check the path" if isinstance(error, FileNotFoundError) else error
        raise DataError(f"{what}: {why}") from error


def _format_of(url: str) -> str:
    name = url.lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    found = _SUFFIXES.get(os.path.splitext(name)[1])
    if found is None:
        raise SettingError(
            f"shards: the suffix of {url} tells no format. Give format=, one of {', '.join(FORMATS)}",
            field="format",
            got=url,
        )
    return found


def _is_remote(url: str) -> bool:
    return "://" in url and not url.startswith("file://")


def _plain(url: str) -> str:
    return url.removeprefix("file://")
