"""Weights outside the model: mapped from the checkpoint's own files, or from a folder that was written for offloading.

Only weights that cannot be mapped from their file are written to an offload folder: weights with another dtype than the
checkpoint's, and those of pickled files. The folder holds one ordinary safetensors file, whose header names the model
and the checkpoint. The file is used again for the same model and checkpoint, and refused for any others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from instep.checkpoint.edge import check, reading, text
from instep.checkpoint.lazy import LazyTensor, read_notes, read_parts
from instep.checkpoint.remote import files_of
from instep.checkpoint.tensors import StoredTensor
from instep.checkpoint.weights import write_plain
from instep.errors import CheckpointError
from instep.types import PathLike
from instep.utils.atomic import replacing
from instep.utils.paths import local_path
from instep.utils.untrusted_files import open_regular, parse_object

FILE = "offloaded_weights.safetensors"
_NOTE = "instep.offload"
# Number of samples that are read from each file, and bytes of a sample, to distinguish checkpoints of equal sizes.
_SAMPLES, _SAMPLE_BYTES = 32, 4096
Stored: TypeAlias = "Tensor | StoredTensor"


class WeightsMap(Mapping[str, Tensor]):
    """Weights by full name, in memory or in files.

    A mapped weight is always the same tensor: it takes no anonymous memory, and getting it costs nothing. Tied names
    give the same object. A weight cannot be mapped if its parts are in files of several ranks, or if it is in an object
    store. Such a weight is read again each time, unless `staged` has it.

    Args:
        stored: for each name a tensor, or an object that reads one.

    Example:
        >>> WeightsMap({"bias": torch.zeros(2)})["bias"]
        tensor([0., 0.])
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = dict(stored)
        self._kept: dict[str, Tensor] = {}
        by_source: dict[object, Tensor] = {}
        for name, source in self.stored.items():
            if isinstance(source, Tensor):
                self._kept[name] = source
            elif isinstance(source, LazyTensor) and source.mappable:
                self._kept[name] = by_source.setdefault(source.parts, source.map())
        self.staged: dict[str, Tensor] = {}
        """Weights that were read ahead, perhaps to another device; they are returned in place of the stored ones."""

    def __getitem__(self, name: str) -> Tensor:
        found = self.staged.get(name)
        return self.at_rest(name) if found is None else found

    def at_rest(self, name: str) -> Tensor:
        """Return a weight from its storage, on the CPU, even if a staged copy exists."""
        kept = self._kept.get(name)
        if kept is not None:
            return kept
        stored = self.stored[name]
        return stored if isinstance(stored, Tensor) else stored.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __deepcopy__(self, memo: object) -> WeightsMap:
        return self  # a copy would hold the whole model in memory; this map never changes, so copies share it

    def __reduce__(self) -> tuple[type[WeightsMap], tuple[dict[str, Stored]]]:
        return type(self), (self.stored,)

    def is_kept(self, name: str) -> bool:
        """Return whether a weight is in memory or mapped, so that using it costs nothing."""
        return name in self._kept


_OFFLOADED: WeakKeyDictionary[nn.Module, WeightsMap] = WeakKeyDictionary()


def set_offloaded_weights(model: nn.Module, weights: WeightsMap) -> None:
    """Record where the values of a model's weights on the meta device are stored."""
    _OFFLOADED[model] = weights


def offloaded_weights(model: nn.Module) -> WeightsMap | None:
    """Return the weights that `load_checkpoint_in_model` has left in files, for `dispatch_model`."""
    return _OFFLOADED.get(model)


def forget_offloaded_weights(model: nn.Module) -> None:
    """Forget where offloaded weights are stored, since the model has its weights again."""
    _OFFLOADED.pop(model, None)


def offload_weights(
    folder: PathLike, shapes: Mapping[str, Iterable[int]], weights: Mapping[str, Stored], source: str = "memory"
) -> dict[str, LazyTensor]:
    """Write weights to an offload folder, one at a time, or reuse files that were written earlier.

    Args:
        folder: the folder, which is created if it is missing.
        shapes: shapes of all parameters and buffers of the model, by name, by which the model is recognized again.
        weights: the weights to offload, by full name.
        source: identity of the checkpoint that the values come from. With "memory", the values come from no checkpoint,
            and are written even if the folder has weights of this model.

    Returns:
        The same weights, as stored in the folder.

    Raises:
        CheckpointError: the folder belongs to another model or checkpoint, or cannot be written.
        CorruptCheckpointError: files in the folder are damaged.
    """
    path = local_path(folder) / FILE
    note = {"model": _digest({name: list(shape) for name, shape in shapes.items()}), "source": source}
    if path.exists():
        there = _opened(path, note)
        if source != "memory" and all(_fits(there.get(name), weight) for name, weight in weights.items()):
            return {name: there[name] for name in weights}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The new file gets its name by a rename, so that a process that maps the old file keeps it.
        with replacing(path, sync=False) as part:
            write_plain(weights, part, metadata={_NOTE: json.dumps(note)})
    except OSError as error:
        raise CheckpointError(
            f"could not write {path}: {error.strerror or error}. Give an offload_folder that can be written to and has "
            "room.",
            path=path,
        ) from error
    return _opened(path, note)


def open_offload_folder(folder: PathLike, shapes: Mapping[str, Iterable[int]]) -> WeightsMap:
    """Open the weights of this model that an earlier process offloaded.

    Args:
        folder: folder that `offload_weights` wrote.
        shapes: shapes of all parameters and buffers of the model, by name.

    Raises:
        CheckpointError: there is no such folder, or it belongs to another model.
    """
    path = local_path(folder) / FILE
    return WeightsMap(_opened(path, {"model": _digest({name: list(shape) for name, shape in shapes.items()})}))


def _opened(path: Path, note: Mapping[str, str]) -> dict[str, LazyTensor]:
    """Open the file of an offload folder; raise CheckpointError if its header does not have the entries of `note`."""
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, and is not read. Give another offload_folder.", path=path)
    with reading(path, "is no file of an offload folder"):
        found = parse_object(read_notes(path).get(_NOTE, "{}"))
        check(found, {"model": text, "source": text}, "its note")
    for key, value in note.items():
        if found[key] != value:
            what = {"model": "another model", "source": "another checkpoint, or one that was changed since"}[key]
            raise CheckpointError(
                f"{path.parent} holds weights of {what}. Give another offload_folder, or delete {path}.", path=path
            )
    return {name: LazyTensor([part]) for name, part in read_parts(path).items()}


def _fits(there: LazyTensor | None, weight: Stored) -> bool:
    return there is not None and there.dtype == weight.dtype and tuple(there.shape) == tuple(weight.shape)


def identity_of(files: Iterable[Path]) -> str:
    """Return a text that identifies the content of files, without reading all of it.

    Args:
        files: files of a checkpoint. The text depends on the name, size, time and some pages of each file.
    """
    found = []
    for path in sorted(files):
        size = files_of(path).size(path)
        if not isinstance(path, Path):
            found.append([str(path), size])
            continue
        with open_regular(path) as file:
            time_ns = os.fstat(file.fileno()).st_mtime_ns
            samples, last = blake2b(), max(0, size - _SAMPLE_BYTES)
            for number in range(_SAMPLES):
                samples.update(os.pread(file.fileno(), _SAMPLE_BYTES, last * number // (_SAMPLES - 1)))
        found.append([path.name, size, time_ns, samples.hexdigest()])
    return _digest(found)


def _digest(value: object) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def put_tensor(model: nn.Module, names: Sequence[str], old: Tensor, value: Tensor) -> None:
    """Give a parameter or buffer a value, under all its names; keep the same object if torch allows that.

    Args:
        model: the model that has the parameter or buffer.
        names: full names of the weight; a tied weight has several.
        old: the parameter or buffer that the model has now.
        value: the new value, on any device; on the meta device if the weight is offloaded.
    """
    if torch._has_compatible_shallow_copy_type(old, value):
        old.data = value
        return
    new: Any = value
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(value, old.requires_grad and value.is_floating_point())
        new.__dict__.update(old.__dict__)  # copy attributes, such as marks of tensor parallelism
    for name in names:
        prefix, _, leaf = name.rpartition(".")
        owner = model.get_submodule(prefix)
        (owner._parameters if isinstance(old, nn.Parameter) else owner._buffers)[leaf] = new
