"""Weights out of the folders that torch.distributed.checkpoint writes, without running code of theirs.

Such a folder has `.metadata`, a pickle, and the ranks' `.distcp` files. The pickle may name what describes a
checkpoint, and nothing else; tensors are read with `weights_only=True`, other objects never. So FSDP's sharded
checkpoints of other trainers can be read.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.manifest import MANIFEST
from instep.errors import CheckpointError, CorruptCheckpointError

_METADATA = ".metadata"
_WITHIN = "pytorch_model_fsdp_0"  # Accelerate's folder, in that of a state
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        )
    ),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a description, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(found, torch.dtype):
            return super().find_class(module, name)
        raise CheckpointError(
            f"a {_METADATA} file names {module}.{name}, which does not describe a checkpoint: reading it would run "
            "code. Save the model's state dict alone where it was made."
        )


def find_dcp_folder(path: Path) -> Path | None:
    """The folder with `.metadata`: the path itself, or Accelerate's folder in it; None where there is none."""
    if not isinstance(path, Path):  # a URL: torch reads local folders
        return None
    if (path / MANIFEST).exists():
        return None
    return next((it for it in (path, path / _WITHIN) if (it / _METADATA).is_file()), None)


def load_dcp_weights(folder: Path, roots: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of a model.

    Args:
        folder: what `find_dcp_folder` found.
        roots: keys under which a model's weights may lie; without any of them all tensors but an optimizer's are taken.

    Returns:
        Name -> tensor on the CPU.

    Raises:
        CheckpointError: it cannot be read without running code, or there is no tensor in it.
        CorruptCheckpointError: it is damaged, or files are missing.
    """
    # Late: half a second, which only these folders need.
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    metadata = _read_metadata(folder / _METADATA)

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    stored = {name: it for name, it in metadata.state_dict_metadata.items() if isinstance(it, TensorStorageMetadata)}
    names = _of_model(stored, metadata.planner_data or {}, roots)
    if not names:
        raise CheckpointError(f"{folder} holds no tensor of a model: {', '.join(list(stored)[:8])}", path=folder)
    weights = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
    try:
        _load_state_dict(dict(weights), storage_reader=Reader(folder), no_dist=True)
    except CheckpointException as error:
        reasons = "; ".join(f"{reason!r}" for reason, _ in error.failures.values())
        raise CorruptCheckpointError(f"{folder} could not be read whole: {reasons}", path=folder) from error
    return {names[name]: tensor for name, tensor in weights.items()}


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error!r}", path=path) from error


def _of_model(
    stored: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]], roots: tuple[str, ...]
) -> dict[str, str]:
    """The model's entries, each with the name of the weight."""
    ways = {name: tuple(map(str, paths.get(name, (name,)))) for name in stored}
    for root in roots:
        under = {name: ".".join(way[1:]) for name, way in ways.items() if way[0] == root and len(way) > 1}
        if under:
            return under
    return {name: ".".join(way) for name, way in ways.items() if not way[0].startswith("optim")}
