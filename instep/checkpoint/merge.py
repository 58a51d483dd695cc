"""Plain files of weights, out of a checkpoint that several ranks wrote."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from instep.checkpoint.files import LocalFiles
from instep.checkpoint.shard import StoredTensor
from instep.checkpoint.tensors import content_of, framing, why_unsavable
from instep.checkpoint.weights import stored_weights
from instep.errors import CheckpointError, UnsavableStateError
from instep.types import Location, PathLike
from instep.utils.paths import to_path

_INDEX = "model.safetensors.index.json"  # as the Hugging Face hub has it
_Weights: TypeAlias = "Mapping[str, StoredTensor] | Mapping[str, Tensor]"


def merge(path: Location, file: PathLike) -> Path:
    """Make one safetensors file of a checkpoint's weights, which anybody reads without instep.

    One tensor at a time is in memory, where they lie in safetensors files. Tied weights are written under each of their
    names, so that `load_state_dict` misses none. Every file that is read is verified where it has a checksum, and the
    new one is there whole or not at all.

    Args:
        path: what `load_weights` reads, of one rank or of many.
        file: what is written; it must not exist.

    Returns:
        The file.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no weights in it.
        CorruptCheckpointError: it is damaged.
        CheckpointError: the file is there already, or cannot be written.

    Example:
        >>> merge("runs/checkpoints/best", "model.safetensors")  # doctest: +SKIP
        >>> safetensors.torch.load_file("model.safetensors")  # doctest: +SKIP
    """
    weights = stored_weights(to_path(path))

    def write(temporary: Path) -> None:
        _write(weights, weights, temporary)

    def publish(temporary: Path, target: Path) -> None:
        os.link(temporary, target)  # unlike a rename it fails where there is something
        temporary.unlink()

    return _put(Path(file), write, publish)


def merge_in_parts(path: Location, folder: PathLike, max_bytes: int) -> Path:
    """The same as a folder of safetensors files with an index, as the Hugging Face hub has large models.

    Args:
        path: as for `merge`.
        folder: what is made; it must not exist.
        max_bytes: of tensors in each file; a tensor that is larger has a file of its own. Where all fit into one, it is
            `model.safetensors`, without an index.

    Returns:
        The folder.

    Raises:
        CheckpointNotFoundError: as for `merge`, as are the others.
    """
    weights = stored_weights(to_path(path))
    sizes = {name: it.dtype.itemsize * it.shape.numel() for name, it in weights.items()}
    parts: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and parts[-1]:
            parts.append([])
            room = max_bytes
        parts[-1].append(name)
        room -= size
    count = len(parts)
    files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    files = files if count > 1 else ["model.safetensors"]

    def write(temporary: Path) -> None:
        temporary.mkdir()
        for file, names in zip(files, parts, strict=True):
            _write(weights, names, temporary / file)
        if count > 1:
            places = {name: file for file, names in zip(files, parts, strict=True) for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            data = json.dumps(index, indent=2).encode()
            with LocalFiles().create(temporary / _INDEX, len(data)) as out:
                out.write(data)
                out.close()
        LocalFiles().sync_folder(temporary)

    def publish(temporary: Path, target: Path) -> None:
        if target.exists():
            raise FileExistsError(target)
        temporary.rename(target)

    return _put(Path(folder), write, publish)


def _write(weights: _Weights, names: Iterable[str], file: Path) -> None:
    for name in names:
        tensor = weights[name]
        problem = why_unsavable(tensor) if isinstance(tensor, Tensor) else None
        if problem is not None:
            raise UnsavableStateError(f"{name} is {problem}")
    # Of the right shape and dtype, and of no size in memory.
    shells = {name: torch.empty((), dtype=weights[name].dtype).expand(weights[name].shape) for name in names}
    head, order = framing(shells)
    with LocalFiles().create(file, len(head) + sum(it.nbytes for it in order.values())) as out:
        out.write(head)
        for name in order:
            tensor = weights[name]
            out.write(content_of(tensor if isinstance(tensor, Tensor) else tensor.read()))
        out.close()


def _put(target: Path, write: Callable[[Path], None], publish: Callable[[Path, Path], None]) -> Path:
    """Write a file or folder under a hidden name first, and never over another."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            publish(temporary, target)
            LocalFiles().sync_folder(target.parent)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        text = f"{target} is there already; nothing is overwritten. Give another name."
        raise CheckpointError(text, path=target) from error
    except OSError as error:
        text = f"could not write {target}: {error.strerror or error}. Give a place that can be written to."
        raise CheckpointError(text, path=target) from error
    return target
