"""Read single shards: the number of records, the place of each record, and the records at given places.

Shards are not trusted. Nothing in them is run as code or followed as a path, each record has a limit of bytes, and a
record that cannot be read becomes a `BadRecord`.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from instep.utils.imports import require
from instep.utils.untrusted_files import open_regular

_SCANNED_BYTES = 8 * 2**20  # number of bytes in one read from a file of lines
_AHEAD_BYTES = 4 * 2**20  # number of bytes around a record that the system is asked to read ahead
_PIECE_BYTES = 2**20  # number of bytes in one read from a column of a Parquet file
_BLOCK = 512  # number of bytes in a block of a tar file
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)  # types of tar members that are plain files
# A kept group of rows is dropped after _TURNS x (number of kept groups) requests for other groups. With random
# requests, a group that is still in use is dropped about once in 10 million requests (e^-16).
_TURNS = 16
_GROUP_BYTES = 2**31 - 1  # maximum number of bytes in a row group, since one array of texts can hold no more

Array = np.ndarray[Any, Any]


class BadRecord(Exception):
    """A record that cannot be read; its text gives the reason."""


class Reader(ABC):
    """Open shard, from which records are read.

    Args:
        path: path of the file on this machine.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        # The file is closed even if nobody calls `close`, as in a worker that ends.
        weakref.finalize(self, self._file.close)

    @abstractmethod
    def read(self, rows: Sequence[int]) -> list[Any]:
        """Read the records with these ascending numbers; a record that cannot be read is a `BadRecord`."""

    @abstractmethod
    def place(self, row: int) -> str:
        """Describe the place of a record in the file."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Ranges(Reader):
    """Shard whose records follow each other: record i is the bytes from `starts[i]` to `starts[i + 1]`.

    Args:
        path: path of the file on this machine.
        starts: result of `scan`.
        most: maximum number of bytes in a record.
    """

    def __init__(self, path: Path, starts: Array, most: int) -> None:
        super().__init__(path)
        self._starts, self._most = starts, most
        self._advised: set[int] = set()

    def read(self, rows: Sequence[int]) -> list[Any]:
        found = []
        for row in rows:
            try:
                found.append(self._parsed(*self._bytes(row)))
            except (BadRecord, ValueError, OSError, tarfile.TarError) as error:
                found.append(error if isinstance(error, BadRecord) else BadRecord(str(error)))
        return found

    def _bytes(self, row: int) -> tuple[bytes, bytes]:
        """Return the byte before a record, and the record's bytes."""
        start, stop = int(self._starts[row]), int(self._starts[row + 1])
        if not 0 <= start < stop or stop - start > self._most:
            raise BadRecord(f"it has {stop - start:,} bytes, and a record may have {self._most:,} (max_record_bytes)")
        self._read_ahead(start // _AHEAD_BYTES)
        before = min(start, 1)
        raw = os.pread(self._file.fileno(), stop - start + before, start - before)
        if len(raw) < stop - start + before:
            raise BadRecord("the file ends within it")
        return raw[:before], raw[before:]

    def _read_ahead(self, part: int) -> None:
        """Ask the system to load a part of the file and the next part, since a window's records are close together."""
        if part in self._advised or not hasattr(os, "posix_fadvise"):
            return
        self._advised.add(part)
        os.posix_fadvise(self._file.fileno(), part * _AHEAD_BYTES, 2 * _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    @abstractmethod
    def _parsed(self, before: bytes, raw: bytes) -> Any: ...

    @classmethod
    @abstractmethod
    def scan(cls, path: Path, most: int) -> Array:
        """Return the byte at which each record starts, and the byte after the last record.

        Raises:
            ValueError: a record has more than `most` bytes.
        """

    def place(self, row: int) -> str:
        return f"record {row} at byte {int(self._starts[row]):,}"


class Text(Ranges):
    """Shard of text lines in UTF-8; each line is a record, without its line end."""

    keeps_blank = True

    @classmethod
    def scan(cls, path: Path, most: int) -> Array:
        """Return the byte at which each line starts, and the byte after the last line."""
        found = [np.zeros(1, np.int64)]
        with open_regular(path) as file:
            at, last = 0, b"\n"
            while block := file.read(_SCANNED_BYTES):
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + (at + 1)
                found.append(ends)
                at, last = at + len(block), block[-1:]
        starts = np.concatenate([*found, [] if last == b"\n" else [at]]).astype(np.int64)
        _check_sizes(starts, most)
        return starts if cls.keeps_blank or len(starts) == 1 else _without_blank(path, starts)

    def _parsed(self, before: bytes, raw: bytes) -> Any:
        if before not in (b"", b"\n") or b"\n" in raw[:-1]:
            raise BadRecord("no line begins or ends there: the index is not of this file")
        return raw.decode("utf-8").rstrip("\r\n")


class JsonLines(Text):
    """Shard of JSON lines; each line is a record, and blank lines are skipped."""

    keeps_blank = False

    def _parsed(self, before: bytes, raw: bytes) -> Any:
        if before not in (b"", b"\n"):
            raise BadRecord("no line begins there: the index is not of this file")
        try:
            return json.loads(raw)
        except RecursionError:
            raise BadRecord("it has too many containers within each other") from None


class Tar(Ranges):
    """Tar archive with groups of files, as in WebDataset: consecutive members with the same base name are a record.

    A record is a dict. `__key__` is the base name: the member's path up to the first dot of its file name. The content
    of each member is stored under the rest of its file name, in lower case: the member "a/7.seg.PNG" has the base name
    "a/7" and the key "seg.png". Folders, links and devices are left out; nothing is written to the disk.
    """

    @classmethod
    def scan(cls, path: Path, most: int) -> Array:
        """Return the byte at which each group starts, and the byte after the last group."""
        found: list[int] = []
        with open_regular(path) as file, tarfile.open(fileobj=io.BufferedReader(file), mode="r:") as archive:
            key, end = None, 0
            while (member := archive.next()) is not None:
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue]  it would keep all of them
                end = archive.offset
                named = _key_of(member)
                if named is not None and named[0] != key:
                    key = named[0]
                    found.append(member.offset)
            if end > os.fstat(file.fileno()).st_size:
                raise tarfile.ReadError("the file ends within its last member")
        starts = np.array([*found, end], np.int64)
        _check_sizes(starts, most)
        return starts

    def _parsed(self, before: bytes, raw: bytes) -> Any:
        record: dict[str, Any] = {}
        for member, content in _members(raw):
            named = _key_of(member)
            if named is None:
                continue
            key, name = named
            if record.setdefault("__key__", key) != key:
                raise BadRecord("it has members of two records: the index is not of this file")
            if name in record:
                raise BadRecord(f"the member {key}.{name} is there twice")
            record[name] = content
        if not record:
            raise BadRecord("no member begins there: the index is not of this file")
        return record


def _members(raw: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the tar members in a piece of an archive, with their contents.

    If a member is not a plain file, such as the header of a long name, tarfile reads the whole piece.
    """
    at, plain = 0, []
    while at + _BLOCK <= len(raw):
        member = tarfile.TarInfo.frombuf(raw[at : at + _BLOCK], "utf-8", "surrogateescape")
        if member.type not in _PLAIN:
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.type in _PLAIN else None
                    yield member, b"" if file is None else file.read()
            return
        start, at = at + _BLOCK, at + _BLOCK + -(-member.size // _BLOCK) * _BLOCK
        plain.append((member, raw[start : start + member.size]))
    yield from plain


def _key_of(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return the base name of a member and the rest of its name; None if the member belongs to no record.

    Raises:
        tarfile.ReadError: the member is a sparse file, or its name leads out of the folder.
    """
    if member.type not in (*_PLAIN, tarfile.GNUTYPE_SPARSE):
        return None
    parts = member.name.split("/")
    if member.type == tarfile.GNUTYPE_SPARSE or member.name.startswith("/") or ".." in parts:
        raise tarfile.ReadError(f"the member {member.name!r} is a sparse file, or its name leads out of the folder")
    base, dot, rest = parts[-1].partition(".")
    if not dot or not base or (base.startswith("__") and base.endswith("__")):
        return None
    return "/".join([*parts[:-1], base]), rest.lower()


class Table(Reader):
    """Shard with a table that is read in groups of rows; the groups that were read last are kept in memory.

    A record is a dict of its columns. A list of numbers becomes a numpy array; any other value is what pyarrow converts
    it to.

    Args:
        path: path of the file on this machine.
        kept: the groups of rows that were read last.
        columns: names of the columns that are read; None: all columns.
    """

    bounds: Array  # index of the first row of each group; then, as the last entry, the number of all rows

    @abstractmethod
    def load(self, number: int) -> Any:
        """Read a group of rows as a record batch of pyarrow."""

    def group(self, number: int) -> Group:
        """Read a group of rows."""
        return Group(self._pyarrow, self.load(number))

    def __init__(self, path: Path, kept: Kept, columns: Sequence[str] | None) -> None:
        super().__init__(path)
        self._kept, self.columns = kept, columns
        self._pyarrow = require("pyarrow", extra="data", purpose=f"reading {path.name}")
        self._errors = (self._pyarrow.ArrowException, OSError, ValueError)

    def read(self, rows: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        while len(found) < len(rows):
            begin = len(found)
            number = int(np.searchsorted(self.bounds, rows[begin], side="right")) - 1
            start, stop = int(self.bounds[number]), int(self.bounds[number + 1])
            own = [row - start for row in rows[begin : bisect_left(rows, stop, begin)]]
            try:
                group = self._kept.get(self, number)
            except self._errors as error:
                found += [BadRecord(f"its group of rows cannot be read: {error}") for _ in own]
                continue
            try:
                found += group.read(own)
            except self._errors:
                found += self._one_by_one(group, own)
        return found

    def _one_by_one(self, group: Group, rows: list[int]) -> Iterator[Any]:
        """Yield rows of a group one by one, since some of them cannot be read; such a row is a `BadRecord`."""
        for row in rows:
            try:
                yield group.read([row])[0]
            except self._errors as error:
                yield BadRecord(f"a value of it cannot be read: {error}")

    def place(self, row: int) -> str:
        group = int(np.searchsorted(self.bounds, row, side="right")) - 1
        return f"row {row} in group {group}"

    def close(self) -> None:
        self._kept.drop(self)
        super().close()


class Parquet(Table):
    """Rows of a Parquet file; a group is a row group."""

    def __init__(self, path: Path, *rest: Any) -> None:
        super().__init__(path, *rest)
        parquet = require("pyarrow.parquet", extra="data", purpose=f"reading {path.name}")
        # The path is passed, since each read of `self._file` would go through Python. `buffer_size` is small, so that
        # the data stays in the processor's cache.
        self._table = parquet.ParquetFile(str(path), pre_buffer=False, buffer_size=_PIECE_BYTES)
        facts = self._table.metadata
        sizes = [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]
        self.bounds = np.cumsum([0, *sizes])

    def _read_ahead(self, number: int) -> None:
        """Ask the system to load a row group that is likely to be read next."""
        if number == self._table.num_row_groups or not hasattr(os, "posix_fadvise"):
            return
        group = self._table.metadata.row_group(number)
        parts = [group.column(column) for column in range(group.num_columns)]
        start = min(part.dictionary_page_offset or part.data_page_offset for part in parts)
        size = sum(part.total_compressed_size for part in parts)
        if start >= 0 <= size:
            os.posix_fadvise(self._file.fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def load(self, number: int) -> Any:
        self._read_ahead(number + 1)
        size = self._table.metadata.row_group(number).total_byte_size
        if size > _GROUP_BYTES:
            raise ValueError(f"it has {size:,} bytes, and at most {_GROUP_BYTES:,} are read at once")
        table = self._table.read_row_group(number, columns=self.columns, use_threads=False)
        batches = (
            table if all(column.num_chunks == 1 for column in table.columns) else table.combine_chunks()
        ).to_batches()
        if len(batches) != 1:
            raise ValueError(f"it is read as {len(batches)} pieces, where one was expected")
        return batches[0]

    def close(self) -> None:
        super().close()
        self._table.close()


class Arrow(Table):
    """Rows of an Arrow file, or of an Arrow stream as Hugging Face's datasets writes it; a group is a record batch.

    The file is memory-mapped, so all processes share one copy of it in the system's cache.
    """

    def __init__(self, path: Path, *rest: Any) -> None:
        super().__init__(path, *rest)
        pyarrow = self._pyarrow
        ipc = require("pyarrow.ipc", extra="data", purpose=f"reading {path.name}")
        self._map = pyarrow.memory_map(str(path))
        try:
            file = ipc.open_file(self._map)
            self._get = file.get_batch
            sizes = [self._get(number).num_rows for number in range(file.num_record_batches)]
        except pyarrow.ArrowInvalid:  # the file has the stream format, which has no list of its batches
            self._map.seek(0)
            batches = list(ipc.open_stream(self._map))
            self._get = batches.__getitem__
            sizes = [batch.num_rows for batch in batches]
        self.bounds = np.cumsum([0, *sizes])

    def load(self, number: int) -> Any:
        batch = self._get(number)
        batch.validate(full=True)  # without this check, wrong offsets in an untrusted file could point to any memory
        return batch if self.columns is None else batch.select(list(self.columns))

    def close(self) -> None:
        super().close()
        self._map.close()


class Group:
    """Group of rows that were decoded together; each requested row becomes a dict of its columns.

    Args:
        pyarrow: the package pyarrow.
        batch: record batch of pyarrow.
    """

    def __init__(self, pyarrow: Any, batch: Any) -> None:
        self.nbytes: int = batch.nbytes
        self._named = partial(zip, batch.schema.names)
        self._getters = [_getter(pyarrow, column) for column in batch.columns]

    def read(self, rows: list[int]) -> list[dict[str, Any]]:
        """Return the rows with these numbers."""
        columns = [get(rows) for get in self._getters]
        return list(map(dict, map(self._named, zip(*columns, strict=True))))


class Kept:
    """The groups of rows that a process requested last, from all its shards, up to a limit of bytes.

    A window of shuffled records requests each of its groups again and again. A group whose last request was long ago
    belongs to an earlier window. So it is dropped even if the limit is not reached, and its memory is used again.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes, self._asked = most, 0, 0
        self._groups: OrderedDict[Any, Group] = OrderedDict()
        self._used: dict[Any, int] = {}

    def get(self, reader: Table, number: int) -> Group:
        """Return a group of a reader; read it if it is not kept."""
        key = reader, number
        self._asked += 1
        if key not in self._groups:
            while self._groups and self._is_past(next(iter(self._groups))):
                self._forget(next(iter(self._groups)))
            self._groups[key] = reader.group(number)
            self._bytes += self._groups[key].nbytes
        self._groups.move_to_end(key)
        self._used[key] = self._asked
        while self._bytes > self._most and len(self._groups) > 1:
            self._forget(next(iter(self._groups)))
        return self._groups[key]

    def _is_past(self, key: Any) -> bool:
        return self._asked - self._used[key] > _TURNS * len(self._groups)

    def _forget(self, key: Any) -> None:
        self._bytes -= self._groups.pop(key).nbytes
        del self._used[key]

    def drop(self, reader: Any) -> None:
        """Free all groups of rows that a reader has read."""
        for key in [key for key in self._groups if key[0] is reader]:
            self._forget(key)


RANGES: dict[str, type[Ranges]] = {"jsonl": JsonLines, "text": Text, "tar": Tar}
TABLES: dict[str, type[Table]] = {"parquet": Parquet, "arrow": Arrow}


def _getter(pyarrow: Any, column: Any) -> Callable[[list[int]], Iterable[Any]]:
    """Return a function that reads values of a column, for common types without building an Arrow array."""
    types, kind = pyarrow.types, column.type
    text = types.is_string(kind) or types.is_large_string(kind)
    if column.null_count:
        return partial(_any_values, pyarrow, column)
    if types.is_integer(kind) or types.is_floating(kind):
        values = column.to_numpy(zero_copy_only=False).tolist()
        return lambda rows: [values[row] for row in rows]
    if types.is_list(kind) or types.is_large_list(kind):
        values = column.values
        if (types.is_integer(values.type) or types.is_floating(values.type)) and not values.null_count:
            return _lists(values.to_numpy(zero_copy_only=False), column.offsets.to_numpy())
    if text or types.is_binary(kind) or types.is_large_binary(kind):
        wide = types.is_large_string(kind) or types.is_large_binary(kind)
        _, places, content = column.buffers()
        starts = np.frombuffer(places, np.int64 if wide else np.int32)[column.offset :][: len(column) + 1].tolist()
        raw = memoryview(b"" if content is None else content)
        if text:
            return lambda rows: [str(raw[starts[row] : starts[row + 1]], "utf-8") for row in rows]
        return lambda rows: [bytes(raw[starts[row] : starts[row + 1]]) for row in rows]
    return partial(_any_values, pyarrow, column)


def _any_values(pyarrow: Any, column: Any, rows: list[int]) -> list[Any]:
    try:
        return column.take(pyarrow.array(rows)).to_pylist()
    except pyarrow.ArrowNotImplementedError:  # some types of columns have no `take`
        return [column[row].as_py() for row in rows]


def _lists(numbers: Array, places: Array) -> Callable[[list[int]], Iterable[Array]]:
    """Return a function that copies lists of numbers out of a group, since a view would keep the group in memory."""
    size = int(places[1] - places[0]) if len(places) > 1 else 0
    if size and (np.diff(places) == size).all():
        matrix = numbers[int(places[0]) : int(places[-1])].reshape(-1, size)
        return lambda rows: matrix.take(rows, 0)
    starts = places.tolist()
    return lambda rows: [numbers[starts[row] : starts[row + 1]].copy() for row in rows]


def _check_sizes(starts: Array, most: int) -> None:
    sizes = np.diff(starts)
    if len(sizes) and int(sizes.max()) > most:
        row = int(sizes.argmax())
        raise ValueError(
            f"record {row} at byte {int(starts[row]):,} has {int(sizes[row]):,} bytes, and a record may have {most:,}. "
            "Look at the file, or give a larger max_record_bytes"
        )


def _without_blank(path: Path, starts: Array) -> Array:
    """Drop the starts of blank lines; each blank line becomes part of the record before it."""
    short = np.flatnonzero(np.diff(starts) <= 8)
    with open_regular(path) as file:

        def is_blank(row: int) -> bool:
            return not os.pread(file.fileno(), int(starts[row + 1] - starts[row]), int(starts[row])).strip()

        blank = [row for row in short.tolist() if is_blank(row)]
    return np.delete(starts, blank) if blank else starts
