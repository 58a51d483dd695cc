"""`save`: writes any object to a single file, by `torch.save` or as safetensors."""

from __future__ import annotations

import pickle
from typing import Any

from instep.checkpoint.weights import write_object
from instep.errors import UnsavableStateError
from instep.state import PartialState
from instep.types import PathLike
from instep.utils.paths import local_path

_NAMES = {True: "model.safetensors", False: "pytorch_model.bin"}  # usual names of weight files on the Hugging Face hub


def save(obj: Any, f: PathLike, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Save an object by `torch.save`, on the main process.

    A reader sees either the whole old file or the whole new one.

    Args:
        obj: the object.
        f: the file; its folder must exist.
        save_on_each_node: whether the first process of each node writes, for disks that nodes do not share.
        safe_serialization: whether to write a dict of tensors as safetensors.

    Raises:
        UnsavableStateError: the object cannot be pickled, or with `safe_serialization` is no dict of tensors; an
            existing file is intact.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save({"weight": torch.ones(2)}, f"{folder}/weights.pt")
        ...     torch.load(f"{folder}/weights.pt", weights_only=True)
        {'weight': tensor([1., 1.])}
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    file = local_path(f)
    try:
        write_object(obj, file, safe_serialization)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        takes = "a dict of tensors" if safe_serialization else "what torch.save can pickle"
        raise UnsavableStateError(
            f"a {type(obj).__name__} could not be saved as {file}: {error}. Give {takes}, such as a state_dict; the "
            "file that was there is intact.",
            path=file,
        ) from error
