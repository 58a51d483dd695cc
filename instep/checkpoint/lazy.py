"""Tensors of a checkpoint that are read only when needed, from one file or from the parts that several ranks wrote.

A "box" is a rectangular part of a tensor, given by a slice for each dimension. Only the bytes of the requested box are
read, so a rank that keeps a part of a tensor never holds the whole tensor. A whole tensor in a local file can also be
memory-mapped (mmap), so that it is used without a copy. A mapped file may be deleted, or replaced by a rename as in
every save of instep. But truncating it or overwriting it in place changes the weights of the process that maps it, or
kills that process with SIGBUS.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from secrets import token_hex
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from instep.checkpoint.edge import Kind, check, count, flag, list_of, reading, text
from instep.checkpoint.files import LocalFiles, patiently
from instep.checkpoint.remote import files_of
from instep.checkpoint.tensors import ALIASES, DTYPES, FORMAT_NAMES, OFFSETS, SHARDS, dtype_from_name
from instep.errors import CorruptCheckpointError
from instep.utils.untrusted_files import open_regular, parse_object

_LONGEST = 100 * 10**6  # largest size of a header in bytes, as in the safetensors library
_TORCH_NAMES = {code: name for name, code in FORMAT_NAMES.items()}
# `mmap.MAP_NORESERVE` exists since Python 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if os.uname().sysname == "Linux" else 0)
_MAPPED: WeakValueDictionary[Any, mmap.mmap] = WeakValueDictionary()  # the mmap object of each mapped file in use
# names of all dtypes of the file format; a header with such a name can be read even if torch lacks the dtype
_FORMATS_OWN = {*_TORCH_NAMES, "F4", "F6_E2M3", "F6_E3M2"}


def _span(value: Any) -> bool:
    """Return True if a value is a list of two byte positions: begin and end."""
    return list_of(count)(value) and len(value) == 2


_ENTRY: dict[str, Kind] = {"dtype": text, "shape": list_of(count), "data_offsets": _span}


@dataclass(frozen=True)
class FileSlice:
    """A tensor, or a part of a tensor, in one safetensors file.

    Args:
        path: path of the file.
        begin: position in the file of the part's first byte.
        end: position in the file after the part's last byte.
        dtype: name of the dtype in torch, or in the file format if torch does not have it.
        sizes: shape of the part.
        shape: shape of the whole tensor.
        offsets: position of the part in the whole tensor: the index of its first element in each dimension; with
            `flat`, one index into the flattened tensor.
        flat: whether the part is a range of elements of the flattened tensor.
        name: name under which the part is stored in the file; tied tensors share one part.
        stamp: device, inode, size and modification time of the file whose header was read; None if the file cannot be
            mapped.
        opened: id that is new each time the header is read. Only parts with the same id share a mapping. So changing a
            model in place changes no other model that was loaded from the same file.
    """

    path: Path
    begin: int
    end: int
    dtype: str
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    flat: bool
    name: str
    stamp: tuple[int, ...] | None = None
    opened: str = field(default="", compare=False)

    @property
    def mappable(self) -> bool:
        """Whether the part is a whole tensor that can be memory-mapped."""
        whole = not self.flat and self.sizes == self.shape
        return whole and self.stamp is not None and self.begin % dtype_from_name(self.dtype).itemsize == 0

    def map(self) -> Tensor:
        """Return the part as a memory-mapped tensor. In-place changes of the tensor do not change the file.

        Raises:
            CorruptCheckpointError: the file has been changed since its header was read.
        """
        dtype = dtype_from_name(self.dtype)
        if self.begin == self.end:
            return torch.empty(self.sizes, dtype=dtype)
        raw = torch.frombuffer(_mapping(self), dtype=torch.uint8, count=self.end - self.begin, offset=self.begin)
        return raw.view(dtype).view(self.sizes)

    def take(self, begin: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read a rectangular box of the part into new memory; the result may be non-contiguous.

        Args:
            begin: index of the box's first element in each dimension of the part.
            sizes: shape of the box.
        """
        dtype = dtype_from_name(self.dtype)
        if 0 in sizes:
            return torch.empty(tuple(sizes), dtype=dtype)
        if self.mappable and any(size < own for size, own in zip(sizes[1:], self.sizes[1:], strict=True)):
            # One read from the first to the last byte of the box would include all columns. A copy from the mapped file
            # reads only pages with bytes of the box.
            box = tuple(slice(at, at + size) for at, size in zip(begin, sizes, strict=True))
            return self.map()[box].clone()
        strides = _strides(self.sizes)
        first = _flat_index(begin, strides)
        last = first + _flat_index([size - 1 for size in sizes], strides)
        start = self.begin + first * dtype.itemsize
        stop = self.begin + (last + 1) * dtype.itemsize
        with reading(self.path, f"does not hold {self.name}"):
            data = patiently(lambda: files_of(self.path).read_range(self.path, start, stop))
        if len(data) != stop - start:
            raise CorruptCheckpointError(f"{self.path} is cut short: it ends within {self.name}", path=self.path)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).as_strided(tuple(sizes), strides)


def _mapping(part: FileSlice) -> mmap.mmap:
    """Memory-map the file of a part, or return the existing mapping of the file."""
    key = str(part.path), part.stamp, part.opened
    kept = _MAPPED.get(key)
    if kept is None:
        with reading(part.path, "cannot be mapped"), open_regular(part.path) as file:
            status = os.fstat(file.fileno())
            if _stamp(status) != part.stamp:
                raise CorruptCheckpointError(
                    f"{part.path} was replaced or changed after its header was read. Load the checkpoint again.",
                    path=part.path,
                )
            # MAP_PRIVATE copies a page into this process's memory when the page is written. MAP_NORESERVE reserves no
            # memory for the other pages, so that the file may be larger than the memory.
            private = mmap.MAP_PRIVATE | _NO_RESERVE
            kept = mmap.mmap(file.fileno(), status.st_size, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        _MAPPED[key] = kept
    return kept


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_notes(path: Path) -> dict[str, str]:
    """Read the metadata (strings by name) of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read.
        CorruptCheckpointError: the file is not a complete safetensors file.
    """
    with reading(path, "is not a safetensors file"):
        return _header(path)[1]


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str], int, int]:
    """Read the header of a safetensors file: return tensor entries, metadata, header size and file size in bytes."""
    files = files_of(path)
    size = patiently(lambda: files.size(path))
    length = int.from_bytes(patiently(lambda: files.read_range(path, 0, 8)), "little")
    if not 0 < length <= min(_LONGEST, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = parse_object(patiently(lambda: files.read_range(path, 8, 8 + length)))
    notes = header.pop("__metadata__", {})
    check(notes, {}, "its metadata", dict.fromkeys(notes, text))
    return header, notes, length, size


def read_parts(path: Path) -> dict[str, FileSlice]:
    """Read the header of a safetensors file: return a FileSlice for each name; tied tensors are under each name.

    Raises:
        CheckpointError: the file cannot be read.
        CorruptCheckpointError: the file is not a complete safetensors file.
    """
    with reading(path, "is not a safetensors file"):
        stamp = _stamp(os.stat(path)) if isinstance(files_of(path), LocalFiles) else None
        header, notes, length, size = _header(path)
        ours = (DTYPES, ALIASES, SHARDS, OFFSETS)
        raw, aliases, shards, offsets = (parse_object(notes.get(key, "{}")) for key in ours)
        opened = token_hex(8)
        found: dict[str, FileSlice] = {}
        for name, entry in header.items():
            check(entry, _ENTRY, name)
            sizes = tuple(entry["shape"])
            dtype = str(raw.get(name, _TORCH_NAMES.get(entry["dtype"], entry["dtype"])))
            if name in raw:  # stored as uint8, with one more dimension for the bytes
                sizes = sizes[:-1]
            begin, end = (8 + length + at for at in entry["data_offsets"])
            shape, flat, at = sizes, False, (0,) * len(sizes)
            if name in shards:
                check(shards[name], {"shape": list_of(count)}, name, {"flat": flag})
                shape, flat = tuple(shards[name]["shape"]), bool(shards[name].get("flat"))
            if name in offsets:
                check(offsets[name], {"saved_offsets": list_of(count)}, name)
                at = tuple(offsets[name]["saved_offsets"][: len(sizes)])
            found[name] = FileSlice(path, begin, end, dtype, sizes, shape, at, flat, name, stamp, opened)
            _check_place(found[name])
        _check_ranges(found.values(), 8 + length, size)
        found.update({alias: found[name] for alias, name in aliases.items()})
    return found


def _check_place(part: FileSlice) -> None:
    """Raise an error if a part has a wrong number of bytes, or is outside of its whole tensor."""
    dtype = vars(torch).get(part.dtype)
    elements, nbytes = math.prod(part.sizes), part.end - part.begin
    if isinstance(dtype, torch.dtype) and elements * dtype.itemsize != nbytes:
        raise ValueError(f"{part.name} has {elements:,} elements of {part.dtype} in {nbytes:,} bytes")
    if not isinstance(dtype, torch.dtype) and part.dtype not in _FORMATS_OWN:
        raise ValueError(f"{part.name} is of the dtype {part.dtype[:40]!r}, which is not known")
    total = (math.prod(part.shape),) if part.flat else part.shape
    if any(at + size > end for at, size, end in zip(part.offsets, part.sizes, total, strict=True)):
        raise ValueError(f"{part.name}: a part of shape {part.sizes} at {part.offsets} is not within {part.shape}")


def _check_ranges(parts: Iterable[FileSlice], begin: int, size: int) -> None:
    """Raise an error if tensors overlap or have gaps between them: in this format, they fill the file exactly."""
    for part in sorted(parts, key=lambda part: (part.begin, part.end)):
        if part.begin != begin or part.end < begin:
            raise ValueError(f"{part.name} does not begin where the tensor before it ends")
        begin = part.end
    if begin != size:
        raise ValueError(f"its tensors end at byte {begin:,}, and the file has {size:,}")


class LazyTensor:
    """A tensor that is read only when needed, from one or more files.

    Args:
        parts: the tensor's parts, in any order. If several ranks wrote the same part, only one copy is used.
    """

    def __init__(self, parts: Iterable[FileSlice]) -> None:
        once: dict[Any, FileSlice] = {}
        for part in parts:
            once.setdefault((part.offsets, part.sizes), part)
        self.parts = tuple(once.values())
        kinds = {(part.shape, part.dtype, part.flat) for part in self.parts}
        if len(kinds) != 1:
            one = self.parts[0]
            raise CorruptCheckpointError(
                f"{one.path.parent}: the parts of {one.name} do not belong together: {sorted(map(str, kinds))}",
                path=one.path.parent,
            )

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.parts[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype in the file."""
        return dtype_from_name(self.parts[0].dtype)

    @property
    def mappable(self) -> bool:
        """Whether `map` needs no copy: the tensor is one part in a local file, aligned to its dtype."""
        return len(self.parts) == 1 and self.parts[0].mappable

    def map(self) -> Tensor:
        """Return the whole tensor on the CPU, memory-mapped if possible, and otherwise read into memory."""
        return self.parts[0].map() if self.mappable else self.read()

    def check_whole(self) -> None:
        """Raise CorruptCheckpointError if the parts do not cover the whole tensor."""
        shape, there = self.parts[0].shape, sum(math.prod(part.sizes) for part in self.parts)
        if there != math.prod(shape):
            one = self.parts[0]
            raise CorruptCheckpointError(
                f"{one.path.parent} holds {there:,} of the {math.prod(shape):,} elements of {one.name}",
                path=one.path.parent,
            )

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Read the tensor, or a box of it, into new CPU memory. Only the bytes of the box are read.

        Args:
            box: a slice with start and stop for each dimension. None: the whole tensor.

        Raises:
            CorruptCheckpointError: the parts do not cover the whole tensor, or a file is damaged.
        """
        shape = self.parts[0].shape
        box = tuple(slice(0, size) for size in shape) if box is None else box
        begin = [side.start for side in box]
        sizes = [max(side.stop - side.start, 0) for side in box]
        self.check_whole()
        if self.parts[0].flat:
            return self._out_of_runs(begin, sizes)
        if len(self.parts) == 1:
            return self.parts[0].take(begin, sizes).contiguous()
        result = torch.empty(sizes, dtype=self.dtype)
        for part in self.parts:
            low = [max(at, of) for at, of in zip(begin, part.offsets, strict=True)]
            ends = zip(begin, sizes, part.offsets, part.sizes, strict=True)
            high = [min(at + size, of + own) for at, size, of, own in ends]
            if all(a < b for a, b in zip(low, high, strict=True)):
                inside = [at - of for at, of in zip(low, part.offsets, strict=True)]
                target = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, begin, strict=True))
                result[target] = part.take(inside, [b - a for a, b in zip(low, high, strict=True)])
        return result

    def _out_of_runs(self, begin: list[int], sizes: list[int]) -> Tensor:
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype)
        strides = _strides(self.parts[0].shape)
        first = _flat_index(begin, strides)
        end = first + _flat_index([size - 1 for size in sizes], strides) + 1
        run = torch.empty(end - first, dtype=self.dtype)
        for part in self.parts:
            low, high = max(first, part.offsets[0]), min(end, part.offsets[0] + part.sizes[0])
            if low < high:
                run[low - first : high - first] = part.take([low - part.offsets[0]], [high - low])
        return run.as_strided(sizes, strides).contiguous()


def join_tensors(files: Iterable[Mapping[str, FileSlice]]) -> dict[str, LazyTensor]:
    """Join the parts of tensors in several files: return for each name a tensor made of all parts with that name."""
    parts: dict[str, list[FileSlice]] = {}
    for file in files:
        for name, part in file.items():
            parts.setdefault(name, []).append(part)
    return {name: LazyTensor(found) for name, found in parts.items()}


def read_all(stored: Mapping[str, LazyTensor]) -> dict[str, Tensor]:
    """Read all tensors. Tied tensors, which have the same parts, become the same object."""
    read: dict[tuple[FileSlice, ...], Tensor] = {}
    for tensor in stored.values():
        if tensor.parts not in read:
            read[tensor.parts] = tensor.read()
    return {name: read[tensor.parts] for name, tensor in stored.items()}


def join_trees(trees: Iterable[Any]) -> Any:
    """Return one state made of the states of several ranks, each of which has its own parts of tensors.

    Dicts are merged by key, and lists item by item. Lists of strings are united, in order and without duplicates.
    Tensors are joined. For any other value, the first rank's value that is not None is used.
    """
    joined: Any = None
    for tree in trees:
        joined = _join(joined, tree)
    return joined


def _join(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, LazyTensor) and isinstance(b, LazyTensor):
        return LazyTensor([*a.parts, *b.parts])
    if type(a) is dict and type(b) is dict:
        return {**a, **{key: _join(a.get(key), value) for key, value in b.items()}}
    if type(a) is list and type(b) is list:
        if all(isinstance(item, str) for item in (*a, *b)):
            return a if a == b else list(dict.fromkeys([*a, *b]))
        return [_join(one, other) for one, other in zip_longest(a, b)]
    return a


def _strides(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 1, 0, -1):
        strides[i - 1] = strides[i] * sizes[i]
    return strides


def _flat_index(at: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(at, strides, strict=True))
