"""One file, at one instant: a reader sees the whole of it or the one before."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint import write_tensors
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import UnsavableStateError
from instep.utils.atomic import replacing
from instep.utils.optimizer_state import clean_name


def save_weights(state: Mapping[str, Tensor], file: Path) -> Path:
    """A safetensors file, at one instant. Collective: the main process writes."""

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            write_tensors(temporary, {clean_name(name): value for name, value in state.items()}, {"format": "pt"})

    on_rank_zero(write, f"saving {file}")
    return file


def save_object(obj: Any, file: Path, is_main: bool) -> None:
    """`torch.save`, at one instant, by the main process."""
    if not is_main:
        return
    try:
        with replacing(file) as temporary:
            torch.save(obj, temporary)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise UnsavableStateError(
            f"a {type(obj).__name__} could not be saved as {file}: {error}. Save what torch.save can pickle, such as a "
            "state_dict; the file that was there is intact.",
            path=file,
        ) from error
