"""A data set of records in many files, with a shuffled order that needs no memory and no pass over the data."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from instep.distributed import gather_object
from instep.errors import DataError, SettingError
from instep.streams.formats import Array, BadRecord, Kept, Reader
from instep.streams.index import Index, default_cache
from instep.streams.order import order_from
from instep.streams.shards import FORMATS, check_unchanged, find_shards
from instep.utils.checks import at_least, choice, is_int, wrong
from instep.utils.warn import warn_user

_OPEN_SHARDS = 16
_WORKERS = 64  # maximum number of workers; each has its own counter of the samples that it left out
_NAMED = 255  # maximum number of left-out samples whose indices a worker keeps


class StreamDataset(Dataset[Any]):
    """Records of many files, as a map-style data set that is read nearly as fast as its files are.

    The records are numbered through all files. So a `DataLoader(stream, shuffle=True)` that the Trainer or the
    Accelerator gets is divided over ranks and workers exactly, and resumes in O(1) with a different number of ranks or
    workers. Its order is a pure function of (seed, epoch): the files come in a random sequence, and `window` records in
    a row are shuffled among themselves. The order takes no memory, however many records there are. With shuffle=False
    the records come in the order of the files.

    The number of records of each file, and the place of each record, are found once and stored in `cache`. They are
    found again if the file's path, size or time of change differs. While a run is stopped, files may be appended to the
    list of `shards`: the interrupted epoch ends with its old files, and the next epoch has all files.

    How each process reads: a record of JSONL, text or tar takes one read at its place. For Parquet, the row groups that
    were used last stay decoded, up to `keep_bytes`. Choose a `window` that spans few row groups, or a `keep_bytes` that
    holds the row groups of one window; otherwise row groups are decoded again and again.

    Args:
        shards: paths or URLs of the files; a path with `*` means all files that match it, sorted. Formats: JSONL,
            Parquet, Arrow (files, and streams as Hugging Face's datasets writes them), WebDataset tar, and text. Remote
            files (by fsspec) and compressed files (.gz, .zst ...) are copied into `cache` when they are first read.
        decode: function that makes a sample from a record. A record is a dict of columns (Parquet, Arrow), a dict of
            the bytes of a group of files with its `__key__` (tar), the parsed line (JSONL), or a str (text). None: the
            sample is the record. The function must be picklable if workers are not forked.
        window: number of consecutive records that are shuffled among themselves, or 1 to shuffle the files only. If the
            files are sorted by class, the window should span several files.
        bucket: number of records in a group of similar length: the records of a window are sorted by `length` and cut
            into groups, which come in a random sequence. Set it to the number of samples of all ranks in a step, so
            that a batch needs little padding. 0: no groups.
        counts: number of records of each file, if known; each number is checked when the file is opened.
        columns: columns of a table that are read; None: all.
        length: name of a record's field that is the record's length (an int), or whose `len` is this length;
            needed for `bucket` and for the attribute `lengths`.
        on_bad_sample: "raise": a record that cannot be read or decoded raises a DataError that names the file and the
            place. "skip": the record is left out of its batch. No other sample takes its place, so every other sample
            still counts once; the smaller batch has the same weight in the mean over ranks as the full one. In a
            `PackedStream` the record is left out of its window, and a window without any record out of its batch.
            `left_out()` returns which samples were left out.
        format: format of all files: "jsonl", "parquet", "arrow", "tar" or "text"; None: by their suffix.
        cache: folder for indices and copies; None: `$XDG_CACHE_HOME/instep/streams`, or `~/.cache/instep/streams`.
        keep_bytes: maximum number of bytes of decoded row groups that a process keeps.
        max_record_bytes: maximum size of a line (JSONL, text), or of a group of files (tar). A larger record is an
            error when the files are indexed.
        storage_options: options for the file systems of fsspec.

    Raises:
        SettingError: a setting is wrong, or a format is not known.
        DataError: a file is missing or damaged, has a record that is too long, or has a number of records that is not
            the one in `counts`.
        MissingPackageError: pyarrow or fsspec is needed and not installed: `pip install 'instep[data]'`.

    Example:
        >>> import json, tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> lines = "".join(json.dumps({"number": number}) + "\\n" for number in range(5))
        >>> _ = (folder / "a.jsonl").write_text(lines)
        >>> stream = StreamDataset(folder / "*.jsonl", decode=lambda record: record["number"], cache=folder)
        >>> len(stream), stream[3], stream.__getitems__([4, 0])
        (5, 3, [4, 0])
        >>> stream.describe_sample(3).rpartition("/")[2]
        'a.jsonl, record 3 at byte 42'
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        decode: Callable[[Any], Any] | None = None,
        *,
        window: int = 10_000,
        bucket: int = 0,
        counts: Sequence[int] | None = None,
        columns: Sequence[str] | None = None,
        length: str | None = None,
        on_bad_sample: str = "raise",
        format: str | None = None,
        cache: str | os.PathLike[str] | None = None,
        keep_bytes: int = 2**28,
        max_record_bytes: int = 2**26,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.window = at_least(1)("window", window)
        self.bucket = at_least(0)("bucket", bucket)
        if bucket and length is None:
            raise SettingError(
                f"bucket={bucket} sorts by length: name the field, as length=...", field="bucket", got=bucket
            )
        self.on_bad_sample = choice("raise", "skip")("on_bad_sample", on_bad_sample)
        if format is not None:
            choice(*FORMATS)("format", format)
        options = dict(storage_options or {})
        self.decode, self.length = decode, length
        self.columns = None if columns is None else list(columns)
        self.shards = find_shards(shards, format, options)
        if counts is not None and not (len(counts) == len(self.shards) and all(is_int(each, 0) for each in counts)):
            raise wrong("counts", counts, f"{len(self.shards)} numbers of records, one for each file")
        most = at_least(1)("max_record_bytes", max_record_bytes)
        self._index = Index(Path(cache) if cache else default_cache(), options, most)
        self._keep_bytes = at_least(0)("keep_bytes", keep_bytes)
        self.counts = np.asarray(self._index.counts(self.shards, counts), dtype=np.int64)
        self._ends = np.cumsum(self.counts)
        self._length = int(self._ends[-1])
        # The last interrupted epoch, and the number of files that it uses; None if it uses all files.
        self._used: tuple[int, int] | None = None
        self._left_out = None
        if on_bad_sample == "skip":
            self._left_out = torch.zeros(_WORKERS, 1 + _NAMED, dtype=torch.int64).share_memory_()
        self._forget()

    def _forget(self) -> None:
        self._kept = Kept(self._keep_bytes)
        self._readers: OrderedDict[int, Reader] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_kept", "_readers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._instep_readable([index], skip=False)[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch, in the order of the indices; records are read in the order of their files."""
        found = self._instep_readable(indices)
        if len(indices) and not found:
            text = f"none of the {len(indices)} samples of a batch can be read, such as"
            raise DataError(f"{text} {self.describe_sample(indices[0])}. Look at the file")
        return found

    def _checked(self, indices: Sequence[int]) -> Array:
        places = np.asarray(indices, dtype=np.int64)
        places = np.where(places < 0, places + self._length, places)
        outside = (places < 0) | (places >= self._length)
        if outside.any():
            raise IndexError(f"sample {indices[int(outside.argmax())]} of a stream of {self._length}")
        return places

    def _instep_readable(self, indices: Sequence[int], skip: bool = True) -> list[Any]:
        """Return the samples of a batch, perhaps none, if `skip` and the user allow to leave out those that are bad."""
        found: list[Any] = [None] * len(indices)
        bad: set[int] = set()
        for places, records in self._records(self._checked(indices)):
            for place, record in zip(places, records, strict=True):
                try:
                    if isinstance(record, BadRecord):
                        raise record
                    found[place] = record if self.decode is None else self.decode(record)
                except Exception as error:  # noqa: BLE001  a user's decode may raise anything
                    wrong_one = self._bad(indices[place], error)
                    if not skip or self.on_bad_sample == "raise":
                        raise wrong_one from (None if isinstance(error, BadRecord) else error)
                    bad.add(place)
                    self._leave_out(indices[place], wrong_one)
        return [sample for place, sample in enumerate(found) if place not in bad] if bad else found

    def _records(self, indices: Array) -> Iterator[tuple[list[int], list[Any]]]:
        """Yield the records of each file, read in the file's order, with their positions in `indices`."""
        order = indices.argsort(kind="stable")
        ordered = indices[order]
        shards = self._ends.searchsorted(ordered, side="right")
        cuts = (np.flatnonzero(np.diff(shards)) + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(ordered)] if len(ordered) else []):
            shard = int(shards[begin])
            check_unchanged(self.shards[shard])
            rows = ordered[begin:end] - (self._ends[shard] - self.counts[shard])
            yield order[begin:end].tolist(), self._reader(shard).read(rows.tolist())

    def _reader(self, shard: int) -> Reader:
        if shard in self._readers:
            self._readers.move_to_end(shard)
            return self._readers[shard]
        if len(self._readers) == _OPEN_SHARDS:
            self._readers.popitem(last=False)[1].close()
        count = int(self.counts[shard])
        reader = self._readers[shard] = self._index.open(self.shards[shard], count, self._kept, self.columns)
        return reader

    def _bad(self, index: int, error: Exception) -> DataError:
        what = error if isinstance(error, BadRecord) else f"decode raised {type(error).__name__}: {error}"
        hint = "" if self.on_bad_sample == "skip" else ". on_bad_sample='skip' leaves such samples out of their batches"
        return DataError(f"sample {index} ({self.describe_sample(index)}) cannot be read: {what}{hint}")

    def _leave_out(self, index: int, error: DataError) -> None:
        assert self._left_out is not None
        worker = get_worker_info()
        mine = self._left_out[0 if worker is None else 1 + worker.id % (_WORKERS - 1)]
        number = int(mine[0])
        mine[1 + number % _NAMED] = index
        mine[0] += 1
        if not number:
            warn_user(f"{error}; it was left out. `left_out()` of the data set says how many were, and which")

    def left_out(self, across_ranks: bool = False) -> tuple[int, list[str]]:
        """Return how many samples this process and its workers left out, and the places of the latest of these.

        Args:
            across_ranks: whether to count the samples of all ranks; each rank gets the same result. Then all ranks must
                call this method.

        Example:
            >>> import tempfile, pathlib
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> _ = (folder / "a.jsonl").write_text("1\\n2\\n")
            >>> StreamDataset(folder / "a.jsonl", on_bad_sample="skip", cache=folder).left_out(across_ranks=True)
            (0, [])
        """
        rows = [] if self._left_out is None else self._left_out.tolist()
        found = [(row[0], row[1 : 1 + min(row[0], _NAMED)]) for row in rows]
        if across_ranks:
            found = gather_object(found)
        places = sorted({index for _, some in found for index in some})
        return sum(number for number, _ in found), [self.describe_sample(index) for index in places]

    def describe_sample(self, index: int) -> str:
        """Return the file of a sample and its place in the file, for a message."""
        index = int(self._checked([index])[0])
        shard = int(np.searchsorted(self._ends, index, side="right"))
        row = int(index - self._ends[shard] + self.counts[shard])
        try:
            place = self._reader(shard).place(row)
        except DataError:
            place = f"record {row}"
        return f"{self.shards[shard].url}, {place}"

    @property
    def lengths(self) -> Array:
        """Length of each sample, from the field `length`: int32, shape [len]. Computed once, then kept in the index.

        Raises:
            SettingError: the data set has no `length`, or a record has no such field.
        """
        if self.length is None:
            raise SettingError("the lengths of a stream are known with length= alone: name the field", field="length")
        parts = []
        for number, (shard, count) in enumerate(zip(self.shards, self.counts.tolist(), strict=True)):
            parts.append(self._index.lengths(shard, count, self.length, lambda number=number: self._all(number)))
        return np.concatenate(parts)

    def _all(self, shard: int) -> Iterator[Any]:
        """Yield all records of a file, for a table with the column of the length only; a bad one has the length 0."""
        count = int(self.counts[shard])
        with closing(self._index.open(self.shards[shard], count, Kept(0), [str(self.length)])) as reader:
            for start in range(0, count, 1024):
                rows = range(start, min(start + 1024, count))
                for row, record in zip(rows, reader.read(rows), strict=True):
                    if isinstance(record, BadRecord) and self.on_bad_sample == "raise":
                        raise self._bad(int(self._ends[shard] - count) + row, record)
                    yield {self.length: 0} if isinstance(record, BadRecord) else record

    # ---- methods that instep's loader calls on a data set with its own order

    def _instep_order_of(self, shuffle: bool, seed: int, epoch: int, cycle: int) -> Sequence[int]:
        """Return the order of an epoch: an object with `len`, whose slices are lists of indices."""
        lengths = self.lengths if shuffle and self.bucket else None
        return order_from(self._spec(epoch), shuffle, seed, epoch, cycle, lengths)

    def _instep_order_spec(self, epoch: int) -> dict[str, Any]:
        """Describe the order of an epoch, for the command `instep runs samples`."""
        spec = self._spec(epoch)
        if self.bucket:
            spec["lengths"] = self._index.names_of_lengths(self.shards[: self._files(epoch)], str(self.length))
        return spec

    def _spec(self, epoch: int) -> dict[str, Any]:
        files = zip(self.shards, self.counts.tolist(), strict=True)
        spec = {"files": [(shard.url, count) for shard, count in files][: self._files(epoch)], "window": self.window}
        return {**spec, "bucket": self.bucket} if self.bucket else spec

    def _files(self, epoch: int) -> int:
        return self._used[1] if self._used is not None and self._used[0] == epoch else len(self.shards)

    def _instep_order_mark(self, epoch: int) -> dict[str, Any]:
        """Return the facts, besides the seed, that determine the order; a checkpoint stores them."""
        files = self._files(epoch)
        return {"files": files, "digest": self._digest(files), "window": self.window, "bucket": self.bucket}

    def _instep_go_on(self, mark: Any, epoch: int) -> None:
        """Continue an interrupted epoch with the files that its description `mark` names.

        Raises:
            DataError: the list of files does not begin with the files of `mark`, or `window` or `bucket` has changed.
        """
        mark = mark if isinstance(mark, dict) else {}
        files = mark.get("files")
        if not is_int(files, 1) or files > len(self.shards) or mark.get("digest") != self._digest(files):
            raise DataError(
                f"the {len(self.shards)} files of the stream are not those that the epoch was begun with ({files} "
                "files, compared by name and number of records, in their order). Give the same list, to which files "
                "may be appended, or resume from the end of an epoch"
            )
        for name in ("window", "bucket"):
            if mark.get(name) != getattr(self, name):
                raise DataError(
                    f"the stream has {name}={getattr(self, name)}, the epoch was begun with {name}={mark.get(name)}. "
                    "Resume with the same one, or from the end of an epoch"
                )
        self._used = None if files == len(self.shards) else (epoch, int(files))

    def _digest(self, files: int) -> str:
        known = zip(self.shards[:files], self.counts[:files].tolist(), strict=True)
        text = "\n".join(f"{os.path.basename(shard.url)} {count}" for shard, count in known)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
