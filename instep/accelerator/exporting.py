"""Single files for anybody to load: a model's weights, in one file or several, and any object."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint import write_tensors
from instep.checkpoint.weights import parts_of
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import UnsavableStateError
from instep.state import PartialState
from instep.types import PathLike
from instep.utils.atomic import replacing
from instep.utils.optimizer_state import clean_name
from instep.utils.paths import local_path

_NAMES = {True: "model.safetensors", False: "pytorch_model.bin"}  # as the Hugging Face hub has them


def save_weights(state: Mapping[str, Any], folder: Path, max_bytes: int, safe: bool) -> Path:
    """Write a model's weights, each file at one instant. Collective: the main process writes.

    Args:
        state: name -> tensor, read on the main process; what is no tensor is left out.
        folder: made if it is not there.
        max_bytes: of tensors in each file.
        safe: safetensors; False: torch's own format.

    Returns:
        The file, or the index of several.
    """

    def write() -> Path:
        weights = {clean_name(name): value for name, value in state.items() if isinstance(value, Tensor)}
        files, index = parts_of(weights, max_bytes, _NAMES[safe])
        target = folder / (_NAMES[safe] if index is None else f"{_NAMES[safe]}.index.json")
        folder.mkdir(parents=True, exist_ok=True)
        stem, _, suffix = _NAMES[safe].partition(".")
        old = [*folder.glob(f"{stem}-*-of-*.{suffix}"), folder / _NAMES[safe], folder / f"{_NAMES[safe]}.index.json"]
        for file, names in files.items():
            _write({name: weights[name] for name in names}, folder / file, safe)
        if index is not None:
            with replacing(target) as temporary:
                temporary.write_bytes(index)
        for path in old:  # a smaller or larger model was saved here before, and readers would find both
            if path.name not in files and path != target:
                with suppress(FileNotFoundError):
                    path.unlink()
        return target

    return on_rank_zero(write, f"saving a model's weights in {folder}")


def save(obj: Any, f: PathLike, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """`torch.save` by the main process, at one instant: a reader sees the whole file or the one before.

    Args:
        obj: what to save.
        f: where to; its folder is there.
        save_on_each_node: each node's first process writes, for disks that nodes do not share.
        safe_serialization: write a dict of tensors as safetensors.

    Raises:
        UnsavableStateError: the object cannot be pickled, or is no dict of tensors with `safe_serialization`; the file
            that was there is intact.

    Example:
        >>> save({"a": 1}, "notes.pt")  # doctest: +SKIP
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    file = local_path(f)
    try:
        _write(obj, file, safe_serialization)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        takes = "a dict of tensors" if safe_serialization else "what torch.save can pickle"
        raise UnsavableStateError(
            f"a {type(obj).__name__} could not be saved as {file}: {error}. Give {takes}, such as a state_dict; the "
            "file that was there is intact.",
            path=file,
        ) from error


def _write(obj: Any, file: Path, safe: bool) -> None:
    with replacing(file) as temporary:
        if safe:
            write_tensors(temporary, obj, {"format": "pt"})
        else:
            torch.save(obj, temporary)
