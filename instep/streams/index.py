"""Index of a shard: the number of its records and the place of each record, found once and stored.

Each shard has a file `<key>.json` in the index folder. A shard of lines or tar members also has a file `<key>.npy` with
the place of each record. The key is a digest of the path, the size and the time of change (or ETag). So an index is
never used for another file, or for the same file after a change. The JSON file is written last, so a reader that finds
it finds both files. A damaged index is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from instep.errors import DataError, SettingError
from instep.streams.formats import RANGES, TABLES, Array, Kept, Reader, Table
from instep.streams.shards import AT_ONCE, Shard, attempted, local_copy
from instep.utils.atomic import replace, replacing
from instep.utils.imports import require
from instep.utils.untrusted_files import LEASE_BYTES, parse_object, read_regular

_VERSION = 1
_LENGTHS = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}\.npy")  # pattern of the names that `_name_of_lengths` returns


def default_cache() -> Path:
    """Return the default folder of indices and copies: `$XDG_CACHE_HOME/instep/streams`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "instep" / "streams"


class Index:
    """The indices of shards in a folder: read or make them, and open shards with them.

    Args:
        cache: folder that has or gets the folders `index` and `copies`.
        options: options for the file system of fsspec.
        most: maximum number of bytes in a record.
    """

    def __init__(self, cache: Path, options: Mapping[str, Any], most: int) -> None:
        self._folder, self._copies = cache / "index", cache / "copies"
        self._options, self._most = options, most

    def counts(self, shards: Sequence[Shard], given: Sequence[int] | None) -> list[int]:
        """Return the number of records in each shard; count the shards that have not been counted yet.

        Args:
            shards: the shards.
            given: numbers of records from the user; they are compared with the index, and with each file when it is
                opened.

        Raises:
            DataError: a shard is damaged, or its number of records is not the one in `given`.
        """
        known = [self._kept_count(shard) for shard in shards]
        for shard, mine, theirs in zip(shards, known, given or known, strict=True):
            if mine is not None and theirs is not None and mine != theirs:
                raise _other_count(shard, mine, theirs)
        if given is not None:
            return list(given)
        if None in known:
            with self._alone(), ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
                known = list(pool.map(self.count, shards))
        return [count for count in known if count is not None]

    def count(self, shard: Shard) -> int:
        """Return the number of records in a shard; count them if they are not counted yet."""
        kept = self._kept_count(shard)
        if kept is not None:
            return kept
        kind = RANGES.get(shard.format)
        with _naming(shard):
            if kind is not None:
                starts = kind.scan(self._local(shard), self._most)
                self._save(f"{shard.key}.npy", starts)
                count = len(starts) - 1
            else:
                count = self._rows(shard)
        facts = {"version": _VERSION, "shard": shard.url, "size": shard.size, "count": count}
        self._folder.mkdir(parents=True, exist_ok=True)
        replace(self._folder / f"{shard.key}.json", json.dumps(facts).encode())
        return count

    def open(self, shard: Shard, count: int, kept: Kept, columns: Sequence[str] | None) -> Reader:
        """Open a shard for reading its records.

        Args:
            shard: the shard.
            count: number of records that the shard must have.
            kept: the groups of rows that were read last.
            columns: names of a table's columns that are read; None: all columns.

        Raises:
            DataError: the shard cannot be read, or does not have `count` records.
        """
        kind = RANGES.get(shard.format)
        with _naming(shard):
            if kind is not None:
                starts = self._starts(shard)
                reader, found = kind(self._local(shard), starts, self._most), len(starts) - 1
            else:
                reader = self._table(shard, kept, columns)
                found = int(reader.bounds[-1])
        if found != count:
            reader.close()
            raise _other_count(shard, found, count)
        return reader

    def lengths(self, shard: Shard, count: int, field: str, records: Callable[[], Iterator[Any]]) -> Array:
        """Return the length of each record in a shard, from the index; if the index does not have it, read the shard.

        Args:
            shard: the shard.
            count: number of records in the shard.
            field: name of the column or field that is the length, or whose `len` is the length.
            records: function that returns the records, or dicts with only this field.
        """
        name = _name_of_lengths(shard, field)
        kept = self._load(name, (count,), np.int32)
        if kept is None:
            values = (_field(record, field, shard) for record in records())
            kept = np.fromiter((value if isinstance(value, int) else len(value) for value in values), np.int32)
            self._save(name, kept)
        return kept

    def names_of_lengths(self, shards: Sequence[Shard], field: str) -> list[str]:
        """Return the names of the files that keep the lengths of some shards."""
        return [_name_of_lengths(shard, field) for shard in shards]

    def kept_lengths(self, names: Sequence[str], counts: Sequence[int]) -> Array:
        """Return the lengths in several files of the index, joined in order.

        Args:
            names: names of the files; they are not trusted, and checked first.
            counts: number of lengths in each file.

        Raises:
            ValueError: a name is not one that `names_of_lengths` makes.
            DataError: a file is missing, or does not hold that many lengths.
        """
        found: list[Array] = []
        for name, count in zip(names, counts, strict=True):
            if not _LENGTHS.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a file of lengths")
            some = self._load(name, (count,), np.int32)
            if some is None:
                raise DataError(
                    f"{self._folder} does not have the lengths of the samples any more ({name}). Name the cache= of "
                    "the stream by --cache. If it was cleared, make the stream over the same files again, read its "
                    "`lengths` once, and try again"
                )
            found.append(some)
        return np.concatenate(found)

    def _kept_count(self, shard: Shard) -> int | None:
        path = self._folder / f"{shard.key}.json"
        try:
            facts = parse_object(read_regular(path, LEASE_BYTES))
        except (OSError, ValueError):
            return None
        count = facts.get("count")
        right = [facts.get("version"), facts.get("shard"), facts.get("size")] == [_VERSION, shard.url, shard.size]
        if not right or type(count) is not int or not 0 <= count < 2**62:
            return None
        if shard.format in RANGES and self._load(f"{shard.key}.npy", (count + 1,)) is None:
            return None
        return count

    def _starts(self, shard: Shard) -> Array:
        count = self.count(shard)
        starts = self._load(f"{shard.key}.npy", (count + 1,))
        if starts is None:
            raise DataError(f"the index of {shard.url} in {self._folder} was removed during the run. Start it again")
        return starts

    def _load(self, name: str, shape: tuple[int, ...], kind: type[Any] = np.int64) -> Array | None:
        try:
            found = np.load(self._folder / name, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return found if found.shape == shape and found.dtype == kind else None

    def _save(self, name: str, values: Array) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._folder / name, sync=False) as part, open(part, "wb") as file:
            np.save(file, values, allow_pickle=False)

    def _rows(self, shard: Shard) -> int:
        """Count the rows of a table; for a remote Parquet file only its footer is read."""
        if shard.format != "parquet" or shard.is_local:
            reader = self._table(shard, Kept(0), None)
            reader.close()
            return int(reader.bounds[-1])
        fsspec = require("fsspec", extra="data", purpose=f"reading {shard.url}")
        parquet = require("pyarrow.parquet", extra="data", purpose=f"reading {shard.url}")

        def read_end() -> int:
            with fsspec.open(shard.url, "rb", **self._options) as file:
                return parquet.read_metadata(file).num_rows

        return attempted(read_end)

    def _table(self, shard: Shard, kept: Kept, columns: Sequence[str] | None) -> Table:
        return TABLES[shard.format](self._local(shard), kept, columns)

    def _local(self, shard: Shard) -> Path:
        return local_copy(shard, self._copies, self._options)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let only one process of a machine count records at a time; processes that wait then find the result."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            import fcntl  # imported late, since not every platform has fcntl
        except ImportError:
            yield
            return
        with open(self._folder / "lock", "wb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            yield


@contextmanager
def _naming(shard: Shard) -> Iterator[None]:
    """Add the shard's name to errors that its reader raises."""
    try:
        yield
    except (DataError, ImportError):
        raise
    except Exception as error:  # pyarrow, tarfile and fsspec have error classes of their own
        raise DataError(
            f"the shard {shard.url} cannot be read as {shard.format}: {error}. Is it whole, and of that format?"
        ) from error


def _name_of_lengths(shard: Shard, field: str) -> str:
    return f"{shard.key}-{hashlib.sha256(field.encode()).hexdigest()[:16]}.npy"


def _other_count(shard: Shard, found: int, given: int) -> DataError:
    return DataError(
        f"the shard {shard.url} has {found} records, and counts= says {given}. Correct counts=, or leave it out"
    )


def _field(record: Any, field: str, shard: Shard) -> Any:
    if not isinstance(record, Mapping) or field not in record:
        raise SettingError(f"length={field!r}: a record of {shard.url} has no such field", field="length", got=field)
    value = record[field]
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if not hasattr(value, "__len__"):
        raise SettingError(
            f"length={field!r}: {type(value).__name__} in {shard.url} is no number and has no length",
            field="length",
            got=field,
        )
    return value
