"""Weights alone, from a checkpoint, a safetensors file, or a file that another trainer wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from instep.checkpoint.catalog import find_checkpoint
from instep.checkpoint.dcp_folders import find_dcp_folder, stored_dcp_weights
from instep.checkpoint.edge import reading
from instep.checkpoint.names import inside
from instep.checkpoint.reader import Reader
from instep.checkpoint.remote import files_of
from instep.checkpoint.retry import patiently
from instep.checkpoint.schema import dict_of, text
from instep.checkpoint.shard import StoredTensor
from instep.checkpoint.stored import JoinedTensor, join_tensors, read_all, read_parts
from instep.checkpoint.tensors import read_tensors
from instep.checkpoint.torch_files import read_torch_file
from instep.checkpoint.zero_folders import find_zero_folder, load_zero_weights
from instep.errors import CheckpointError
from instep.types import Location
from instep.utils.paths import to_path
from instep.utils.regular_files import INDEX_BYTES
from instep.utils.strict_json import parse_object

_FOREIGN = (".pt", ".pth", ".ckpt", ".bin")
_INDEX = ".json"  # of the files of a model, as the Hugging Face hub has it
_NESTED = ("state_dict", "model", "model_state_dict")  # where Lightning and common scripts keep the weights


def load_weights(path: Location) -> dict[str, Tensor]:
    """Read a model's weights.

    A file written by torch.save is read with `weights_only=True`: one that would run code is refused.

    Args:
        path: a path or URL: a checkpoint folder (with or without "-<attempt>"), a .safetensors file or the
            .safetensors.index.json of several, a .pt, .pth, .ckpt or .bin file that holds a state dict, by itself or
            under "state_dict", "model" or "model_state_dict", or a folder that DeepSpeed or
            torch.distributed.checkpoint wrote.

    Returns:
        Parameter or buffer name -> tensor on the CPU; tied ones under every name.

    Raises:
        CheckpointNotFoundError: there is nothing, or no weights in it.
        CorruptCheckpointError: it is damaged.
        CheckpointError: it cannot be read without running code, or holds no state dict.

    Example:
        >>> model.load_state_dict(load_weights("runs/checkpoints/best"))  # doctest: +SKIP
    """
    path = to_path(path)
    if path.is_file():
        if path.suffix in _FOREIGN:
            return _load_foreign(path)
        return read_all(_stored_in(path)) if path.suffix == _INDEX else read_tensors(path)
    foreign = _stored_folder(path)
    if foreign is None:
        return Reader(find_checkpoint(path)).weights()
    return {name: it if isinstance(it, Tensor) else it.read() for name, it in foreign.items()}


def stored_weights(path: Path) -> Mapping[str, StoredTensor] | Mapping[str, Tensor]:
    """The weights that `load_weights` would read, each one left there until it, or a box of it, is read.

    Args:
        path: what is neither a checkpoint nor a safetensors file is read whole.
    """
    if not path.is_file():
        foreign = _stored_folder(path)
        return Reader(find_checkpoint(path)).stored_weights() if foreign is None else foreign
    return _load_foreign(path) if path.suffix in _FOREIGN else _stored_in(path)


def _stored_folder(path: Path) -> Mapping[str, StoredTensor] | Mapping[str, Tensor] | None:
    """The weights of a folder that DeepSpeed or torch.distributed.checkpoint wrote; None where neither did."""
    zero = find_zero_folder(path)
    if zero is not None:
        return load_zero_weights(zero, read_torch_file)
    shards = find_dcp_folder(path)
    return None if shards is None else stored_dcp_weights(shards, _NESTED)


def _stored_in(path: Path) -> dict[str, JoinedTensor]:
    if path.suffix != _INDEX:
        return join_tensors([read_parts(path)])
    return join_tensors([read_parts(file) for file in indexed_files(path)])


def indexed_files(path: Path) -> list[Path]:
    """The files that an index names (`*.index.json`, as the Hugging Face hub has it), which lie in its folder.

    Raises:
        CorruptCheckpointError: it is no index.
        CheckpointError: it names what lies elsewhere, or cannot be read.
    """
    with reading(path, "is no index of weights' files"):
        named = parse_object(patiently(lambda: files_of(path).read(path, INDEX_BYTES)))["weight_map"]
        if not named or not dict_of(text)(named):
            raise ValueError("its weight_map is no object of names")
        return [inside(path.parent, file, path) for file in sorted(set(named.values()))]


def plain_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state dict without what a file may have put on them; tied ones stay one object."""
    once: dict[int, Tensor] = {}
    return {str(name): once.setdefault(id(it), torch.Tensor.detach(it)) for name, it in state.items()}


def _load_foreign(path: Path) -> dict[str, Tensor]:
    loaded = read_torch_file(path)
    nested = [loaded.get(key) for key in _NESTED] if isinstance(loaded, Mapping) else []
    for candidate in (*nested, loaded):
        if _is_state_dict(candidate):
            return plain_tensors(candidate)
    keys = ", ".join(map(str, list(loaded)[:8])) if isinstance(loaded, Mapping) else type(loaded).__name__
    raise CheckpointError(
        f"{path} holds no state dict: expected names with tensors, by themselves or under {', '.join(_NESTED)}; "
        f"got {keys}",
        path=path,
    )


def _is_state_dict(value: Any) -> TypeGuard[Mapping[str, Tensor]]:
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(v, Tensor) for v in value.values())
