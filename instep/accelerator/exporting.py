"""Any object in a single file, by `torch.save` or as safetensors."""

from __future__ import annotations

import pickle
from typing import Any

from instep.errors import UnsavableStateError
from instep.pretrained import write_object
from instep.state import PartialState
from instep.types import PathLike
from instep.utils.paths import local_path

_NAMES = {True: "model.safetensors", False: "pytorch_model.bin"}  # as the Hugging Face hub has them


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
        write_object(obj, file, safe_serialization)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        takes = "a dict of tensors" if safe_serialization else "what torch.save can pickle"
        raise UnsavableStateError(
            f"a {type(obj).__name__} could not be saved as {file}: {error}. Give {takes}, such as a state_dict; the "
            "file that was there is intact.",
            path=file,
        ) from error
