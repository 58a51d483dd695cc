"""Read checkpoints of Lightning (a file of torch.save) and Accelerate (a folder) without running code; write them.

Source: what `Trainer.save_checkpoint` of Lightning 2 and `Accelerator.save_state` of Accelerate 1 write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint import read_tensors, write_tensors
from instep.checkpoint.edge import check, count, named, none_or, reading, text
from instep.checkpoint.foreign.torch_files import read_torch_file
from instep.checkpoint.weights import indexed_files, load_weights, plain_tensors
from instep.cli.checkpoint.contents import Contents, put
from instep.errors import CheckpointError, CorruptCheckpointError

# Version of Lightning in files that are written. It is the oldest version that reads this layout, since Lightning warns
# about files of newer versions than the installed one.
_VERSION = "2.0.0"
_LEFT = {
    "loops": "the place in the epoch (loops)",
    "callbacks": "callbacks",
    "optimizer_states": "optimizers (their states are by number, and the file does not say of which parameter)",
    "lr_schedulers": "schedulers",
    "MixedPrecision": "the gradient scaler",
}
_KNOWN = {
    *_LEFT, "state_dict", "epoch", "global_step", "pytorch-lightning_version",
    "hyper_parameters", "hparams_name", "hparams_type",
}  # fmt: skip

# Names of Accelerate's weights: a whole file, or an index that names the shards. Formats without pickle come first.
_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip


def read_lightning(path: Path) -> Contents:
    """Read a checkpoint of Lightning: its weights, its hyperparameters, and values that hooks added to it."""
    loaded = read_torch_file(path)
    with reading(path, "is no checkpoint of Lightning"):
        return _contents(loaded, path)


def _contents(loaded: Any, path: Path) -> Contents:
    if not isinstance(loaded, dict) or not isinstance(loaded.get("state_dict"), dict):
        found = ", ".join(map(str, list(loaded)[:8])) if isinstance(loaded, dict) else type(loaded).__name__
        raise CheckpointError(
            f"{path} is no checkpoint of Lightning: it has no 'state_dict', but {found}. For a plain state dict use "
            "instep.checkpoint.load_weights.",
            path=path,
        )
    kinds = {
        **dict.fromkeys(("epoch", "global_step"), count),
        "hparams_name": none_or(text),
        "hyper_parameters": none_or(named),
        "state_dict": named,
    }
    check(loaded, {}, "it", kinds)
    state = loaded["state_dict"]
    name = loaded.get("hparams_name")
    return Contents(
        weights=plain_tensors({key: value for key, value in state.items() if isinstance(value, Tensor)}),
        extra={key: value for key, value in state.items() if not isinstance(value, Tensor)},
        hyper_parameters=dict(loaded.get("hyper_parameters") or {}),
        hparams_name=None if name == "kwargs" else name,
        epoch=loaded.get("epoch", 0),
        global_step=loaded.get("global_step", 0),
        user={str(key): value for key, value in loaded.items() if key not in _KNOWN},
        left_out=[text for key, text in _LEFT.items() if loaded.get(key)],
    )


def write_lightning(contents: Contents, path: Path) -> Path:
    """Write a file for Lightning's `load_from_checkpoint`, with the states of optimizers and schedulers."""
    schedulers = {str(number): state for number, state in enumerate(contents.schedulers)}
    checkpoint: dict[str, Any] = {
        **contents.safe("the value", contents.user),
        "epoch": contents.epoch,
        "global_step": contents.global_step,
        "pytorch-lightning_version": _VERSION,
        "state_dict": {**contents.weights, **contents.safe("the model's", contents.extra)},
        "callbacks": {},
        "optimizer_states": contents.numbered_optimizers(),
        "lr_schedulers": list(contents.safe("scheduler", schedulers).values()),
        "hparams_name": contents.hparams_name or "kwargs",
        "hyper_parameters": contents.safe("hyperparameter", contents.hyper_parameters),
    }

    def write(temporary: Path) -> None:
        torch.save(checkpoint, temporary)
        read_torch_file(temporary)  # raises if reading the file would run code of a pickle

    return put(path, write)


def is_accelerate(folder: Path) -> bool:
    """Return whether a folder has weights under Accelerate's names."""
    return any((folder / name).is_file() for name in _WEIGHTS)


def read_accelerate(folder: Path) -> Contents:
    """Read the weights of the first model. All other files, most of which are pickles, are listed as left out."""
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
    """Write a folder for Accelerate's `Accelerator.load_state`: one model, its optimizers and schedulers."""
    contents.leave_out("extra", "hyper_parameters", "user")
    files: dict[str, Any] = {}
    for base, states in (("optimizer", contents.numbered_optimizers()), ("scheduler", contents.schedulers)):
        for number, state in enumerate(states):
            files[f"{base}.bin" if number == 0 else f"{base}_{number}.bin"] = state

    def write(temporary: Path) -> None:
        temporary.mkdir()
        # Tied weights are written once, since Accelerate expects this.
        write_tensors(temporary / "model.safetensors", contents.weights)
        for name, state in files.items():
            torch.save(state, temporary / name)

    return put(folder, write)
