"""Checkpoints of Hugging Face Accelerate: a folder with the weights in safetensors, and pickles.

Source: what `Accelerator.save_state` and `save_model` write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint import read_tensors, write_tensors
from instep.checkpoint.weights import indexed_files, load_weights
from instep.cli.checkpoint.contents import Contents, put
from instep.errors import CorruptCheckpointError

# A whole file, or an index that names the shards; the safe ones first.
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


def is_accelerate(folder: Path) -> bool:
    """Whether a folder has weights under Accelerate's names."""
    return any((folder / name).is_file() for name in _WEIGHTS)


def read_accelerate(folder: Path) -> Contents:
    """Read the first model's weights. The other files are pickles by number: they are left out, and named."""
    name = next(name for name in _WEIGHTS if (folder / name).is_file())
    parts = indexed_files(folder / name) if name.endswith(".json") else [folder / name]
    weights: dict[str, Tensor] = {}
    for path in parts:
        if not path.is_file():
            raise CorruptCheckpointError(f"{path} is missing; {name} lists it", path=path)
        weights.update(read_tensors(path) if path.suffix == ".safetensors" else load_weights(path))
    others = sorted(path.name for path in folder.iterdir() if path.name != name and path not in parts)
    return Contents(weights, left_out=others)


def write_accelerate(contents: Contents, folder: Path) -> Path:
    """Write what `Accelerator.load_state` reads: one model, its optimizers and schedulers."""
    contents.leave_out("extra", "hyper_parameters", "user")
    files: dict[str, Any] = {}
    for base, states in (("optimizer", contents.numbered_optimizers()), ("scheduler", contents.schedulers)):
        for number, state in enumerate(states):
            files[f"{base}.bin" if number == 0 else f"{base}_{number}.bin"] = state

    def write(temporary: Path) -> None:
        temporary.mkdir()
        write_tensors(temporary / "model.safetensors", contents.weights)  # tied ones once, as Accelerate wants them
        for name, state in files.items():
            torch.save(state, temporary / name)

    return put(folder, write)
