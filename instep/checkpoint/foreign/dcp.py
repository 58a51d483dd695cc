"""Read weights from folders of torch.distributed.checkpoint (sharded FSDP checkpoints), without running code.

Such a folder has the pickle `.metadata` and a `.distcp` file for each rank. In a `.distcp` file, each piece of a tensor
is stored as torch.save writes it. The pickle is read with plain records in place of the objects that it names. Pieces
of tensors are read with `weights_only=True`; other objects are never read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.edge import check, count, list_of, reading, text
from instep.checkpoint.foreign.pickles import Record, read_pickle
from instep.checkpoint.foreign.torch_files import load_torch
from instep.checkpoint.names import MANIFEST, inside
from instep.checkpoint.remote import files_of
from instep.checkpoint.tensors import StoredTensor, dtype_from_name
from instep.errors import CheckpointError, CorruptCheckpointError
from instep.utils.untrusted_files import read_regular

_METADATA = ".metadata"
_METADATA_BYTES = 2**29
_WITHIN = "pytorch_model_fsdp_0"  # subfolder in which Accelerate stores the weights
_OF_DCP = ("torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem.")


@dataclass(frozen=True)
class _Piece:
    """A rectangular part of a tensor, and the file and position of its bytes."""

    path: Path
    begin: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _DcpTensor:
    """A tensor in a folder of torch.distributed.checkpoint, which is read only when `read` is called."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[_Piece]) -> None:
        self.name, self.shape, self.dtype, self._pieces = name, torch.Size(shape), dtype, pieces

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Read the tensor, or a rectangular part of it (a slice for each dimension), into new CPU memory."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for piece in self._pieces:
            with reading(piece.path, f"does not hold {self.name}"):
                data = files_of(piece.path).read_range(piece.path, piece.begin, piece.begin + piece.length)
                tensor = load_torch(BytesIO(data), piece.path)
                if not isinstance(tensor, Tensor) or tuple(tensor.shape) != piece.sizes or tensor.dtype != self.dtype:
                    raise CorruptCheckpointError(
                        f"{piece.path} holds something else than {piece.sizes} of {self.name}", path=piece.path
                    )
                at = tuple(slice(low, low + size) for low, size in zip(piece.offsets, piece.sizes, strict=True))
                whole[at] = tensor
        return whole if box is None else whole[box].clone()


def find_folder(path: Path) -> Path | None:
    """Return the folder with the file `.metadata`: `path` or Accelerate's subfolder of it; None if neither has it."""
    if not isinstance(path, Path):  # `path` is a URL, but torch's checkpoints are read only from local folders
        return None
    if (path / MANIFEST).exists():
        return None
    return next((folder for folder in (path, path / _WITHIN) if (folder / _METADATA).is_file()), None)


def open_folder(folder: Path, roots: tuple[str, ...]) -> Mapping[str, StoredTensor]:
    """Return the tensors of the model by name; a tensor is read from its file only when its `read` is called.

    Args:
        folder: folder that `find_folder` returned.
        roots: keys that may hold a model's weights. If none of them exists, all tensors except those of an optimizer
            are returned.

    Raises:
        CheckpointError: the folder has no tensor, or names a file outside of it.
        CorruptCheckpointError: the folder is damaged, or files are missing.
    """
    path = folder / _METADATA
    with reading(path, "does not describe a checkpoint of torch.distributed.checkpoint"):
        stored, ways = _describe(read_pickle(read_regular(path, _METADATA_BYTES)), folder)
        names = _of_model(stored, ways, roots)
    if not names:
        raise CheckpointError(f"{folder} holds no tensor of a model: {', '.join(list(stored)[:8])}", path=folder)
    return {weight: stored[name] for name, weight in names.items()}


def _describe(metadata: Any, folder: Path) -> tuple[dict[str, _DcpTensor], dict[str, tuple[Any, ...]]]:
    """Return all tensors by name, and for each name the tuple of keys that lead to the tensor in the state dict."""
    about = _state(metadata, "Metadata")
    places: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for key, value in about["storage_data"].items():
        index, place = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        check(index, {"fqn": text}, "an index")
        check(place, {"offset": count, "length": count, "relative_path": text}, f"the place of {index['fqn']}")
        if place.get("transform_descriptors"):
            raise CheckpointError(f"{folder} is compressed, which is not read here", path=folder)
        places[index["fqn"], _sizes(index.get("offset"))] = place
    found: dict[str, _DcpTensor] = {}
    for name, record in about["state_dict_metadata"].items():
        if type(record) is Record and record.name.endswith(".TensorStorageMetadata"):
            found[str(name)] = _tensor(str(name), _state(record, "TensorStorageMetadata"), places, folder)
    _check_ranges(found.values())
    ways = about.get("planner_data") or {}
    return found, {name: ways.get(name, (name,)) for name in found}


def _tensor(name: str, about: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]], folder: Path) -> _DcpTensor:
    properties, shape = about["properties"], _sizes(about["size"])
    kind = properties.state[0] if type(properties.state) is tuple else properties.state["dtype"]
    if type(kind) is not Record or not kind.name.startswith("torch."):
        raise ValueError(f"{name} has no dtype")
    dtype = dtype_from_name(kind.name.removeprefix("torch."))
    pieces = {}
    for record in about["chunks"]:
        chunk = _state(record, "ChunkStorageMetadata")
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        place = places[name, offsets]
        inner = inside(folder, place["relative_path"], folder / _METADATA)
        pieces[offsets, sizes] = _Piece(inner, place["offset"], place["length"], offsets, sizes)
        if any(at + size > end for at, size, end in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a piece of {name} leads out of it")
        if math.prod(sizes) * dtype.itemsize > place["length"]:
            raise ValueError(f"a piece of {name} is longer than what is stored of it")
    there = sum(math.prod(piece.sizes) for piece in pieces.values())
    if there != math.prod(shape):
        raise ValueError(f"{there:,} of the {math.prod(shape):,} elements of {name} are there")
    return _DcpTensor(name, shape, dtype, list(pieces.values()))


def _check_ranges(tensors: Any) -> None:
    """Raise an error if pieces of tensors overlap in a file, or are beyond the end of a file."""
    ranges: dict[Path, set[tuple[int, int]]] = {}
    for piece in chain.from_iterable(tensor._pieces for tensor in tensors):
        ranges.setdefault(piece.path, set()).add((piece.begin, piece.length))
    for path, found in ranges.items():
        end = 0
        for begin, length in sorted(found):
            if begin < end:
                raise ValueError(f"pieces overlap in {path.name}")
            end = begin + length
        try:
            size = files_of(path).size(path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{path} is missing; {_METADATA} names it", path=path) from error
        if end > size:
            raise ValueError(f"{path.name} is cut short")
    if sum(map(len, ranges.values())) != sum(len(tensor._pieces) for tensor in tensors):
        raise ValueError("two tensors have the same place")


def _state(record: Any, name: str) -> Mapping[str, Any]:
    """Return the attributes of a record that stands for an object of torch.distributed.checkpoint."""
    if type(record) is not Record or record.name not in [f"{module}{name}" for module in _OF_DCP]:
        what = record.name if type(record) is Record else type(record).__name__
        raise ValueError(f"it names {what}, which does not describe a checkpoint; {name} is expected")
    if type(record.state) is not dict:
        raise ValueError(f"a {name} without attributes")
    return record.state


def _sizes(size: Any) -> tuple[int, ...]:
    """Return the sizes in a record that stands for a torch.Size; () for None."""
    if size is None:
        return ()
    values: Any = size.args[0] if type(size) is Record and size.name == "torch.Size" and size.args else size
    if not list_of(count)(values):
        raise ValueError(f"a {type(values).__name__} that is no size")
    return tuple(values)


def _of_model(
    stored: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]], roots: tuple[str, ...]
) -> dict[str, str]:
    """Select the tensors of the model; return a dict from their stored names to the names of the weights."""
    ways = {name: tuple(map(str, paths.get(name, (name,)))) for name in stored}
    for root in roots:
        under = {name: ".".join(way[1:]) for name, way in ways.items() if way[0] == root and len(way) > 1}
        if under:
            return under
    return {name: ".".join(way) for name, way in ways.items() if not way[0].startswith("optim")}
