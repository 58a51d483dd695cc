"""The contents of a checkpoint of any format, and functions that read and write instep's format and safetensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep import __version__
from instep.checkpoint import CheckpointStore, Writer, load_weights, names, read_tensors
from instep.checkpoint.lazy import join_tensors, read_parts
from instep.checkpoint.reader import WEIGHT_SETS, whole_name
from instep.checkpoint.scan import folder_names
from instep.checkpoint.weights import write_new, write_plain
from instep.errors import CheckpointError
from instep.trainer.weights import saved_run
from instep.utils.optimizer_state import check_trees

_WITHOUT_NAME = (torch.complex128, torch.complex32)


def read_headers(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the header of each tensor in safetensors files; a tensor may be split over several files.

    Args:
        paths: the safetensors files.

    Returns:
        Tensor name -> shape, dtype (torch's name), bytes; `same_as` if the data are stored under another name; `parts`,
        the number of pieces, if the tensor is split.

    Raises:
        CorruptCheckpointError: a file is not a whole safetensors file.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in sorted(join_tensors(map(read_parts, paths)).items()):
        parts = tensor.parts
        found[name] = {
            "shape": list(parts[0].shape),
            "dtype": parts[0].dtype,
            "bytes": sum(part.end - part.begin for part in parts),
            **({"same_as": parts[0].name} if name != parts[0].name else {}),
            **({"parts": len(parts)} if len(parts) > 1 else {}),
        }
    return found


@dataclass
class Contents:
    """Everything that was read from a checkpoint.

    Args:
        weights: the model's tensors, by name.
        extra: entries of the model's state dict that are not tensors.
        hyper_parameters: the saved arguments of the module.
        hparams_name: name of the argument, if the hyperparameters are a single argument of the module.
        epoch: number of the epoch, from 0.
        global_step: number of optimizer steps done.
        user: what the hook `on_save_checkpoint` added.
        optimizers: states of the optimizers, with parameters by name, as in instep's own checkpoints.
        schedulers: state dicts of the schedulers.
        left_out: names of the parts of the source that these fields do not hold, for a message; writers add the names
            of parts that they cannot write.
    """

    weights: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    hparams_name: str | None = None
    epoch: int = 0
    global_step: int = 0
    user: dict[str, Any] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def leave_out(self, *names: str) -> None:
        """Add the names of the given fields to `left_out`, except empty fields."""
        self.left_out += [name.replace("_", " ") for name in names if getattr(self, name)]

    def numbered_optimizers(self) -> list[dict[str, Any]]:
        """Return the optimizers' state dicts in torch's form, with numbers from 0 in place of parameter names."""
        states = []
        for number, tree in enumerate(self.optimizers):
            index = {name: i for i, name in enumerate(name for group in tree["groups"] for name in group["params"])}
            groups = [
                {**self.safe(f"optimizer {number}'s", group), "params": [index[name] for name in group["params"]]}
                for group in tree["groups"]
            ]
            state = {**tree.get("common", {}), **{index[name]: value for name, value in tree["state"].items()}}
            states.append({"state": state, "param_groups": groups})
        return states

    def safe(self, whose: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that torch can read without running code; add the names of the others to `left_out`."""
        kept: dict[str, Any] = {}
        for key, value in values.items():
            buffer = io.BytesIO()
            try:
                torch.save(value, buffer)
                buffer.seek(0)
                torch.load(buffer, weights_only=True)
            except (pickle.PickleError, AttributeError, TypeError, ValueError, RuntimeError):
                self.left_out.append(f"{whose} {key!r} ({type(value).__name__}: only a pickle can hold it)")
            else:
                kept[key] = value
        return kept


def read_instep(path: Path, which: str | None = None) -> Contents:
    """Read an instep checkpoint; every file is verified.

    Args:
        path: the checkpoint's folder.
        which: set of weights of a run with WeightAveraging, "live" or "averaged"; None: the set that is loaded by
            default.
    """
    reader = CheckpointStore(path.parent).read(path)
    contents = Contents(load_weights(path, which), epoch=0, global_step=reader.manifest.step)
    files = {whole_name(name) for name in reader.manifest.files if not name.startswith("model")}
    files -= {f"{kind}.safetensors" for kind in WEIGHT_SETS}
    contents.left_out += [f"{kind} weights" for kind in reader.weight_sets if kind != (which or reader.weight_sets[0])]
    if reader.has_state("model_extra"):
        contents.extra = reader.state("model_extra")
    if reader.has("trainer.json"):
        state = saved_run(reader).shared
        contents.hyper_parameters = dict(state["hyper_parameters"])
        contents.hparams_name = state["hparams_name"]
        contents.epoch, contents.user = state["epoch"], state["user"]
        contents.schedulers = state.get("schedulers", [])
        if reader.has_state("optimizer"):
            contents.optimizers = reader.state("optimizer")
            check_trees(contents.optimizers)
            files -= {"optimizer.json", "optimizer.safetensors"}
        names = ("position", "data", "callbacks", "loggers", "datamodule", "metrics", "scaler")
        contents.left_out += [name for name in names if state.get(name)]
        files.discard("trainer.json")
    of_ranks = {name for name in files if name.startswith("rank-")}
    if of_ranks:
        contents.left_out.append("random generators and open sums of each rank")
    contents.left_out += sorted(files - of_ranks)
    return contents


def write_instep(contents: Contents, path: Path) -> Path:
    """Write a checkpoint of weights, for `load_from_checkpoint`; an attempt number is added to the folder's name.

    Raises:
        CheckpointError: a checkpoint of this name, with any attempt number, exists already.
    """
    there = [name for name in folder_names(path.parent) if (names.split_name(name) or (name,))[0] == path.name]
    if there or path.exists():
        taken = path.parent / there[0] if there else path
        raise CheckpointError(f"{taken} exists already; nothing is overwritten. Give another name.", path=taken)
    contents.leave_out("optimizers", "schedulers")
    shared = {
        "instep_version": __version__,
        "epoch": contents.epoch,
        "global_step": contents.global_step,
        "world_size": 1,
        "hyper_parameters": contents.hyper_parameters,
        "hparams_name": contents.hparams_name,
        "user": contents.user,
    }

    def write(writer: Writer) -> None:
        writer.tensors("model.safetensors", contents.weights)
        if contents.extra:
            writer.state("model_extra", contents.extra)
        writer.state("trainer", shared)

    info = {"kind": "weights", "epoch": contents.epoch}
    return CheckpointStore(path.parent).save(contents.global_step, write, info=info, name=path.name)


def read_safetensors(path: Path) -> Contents:
    """Read the weights in a safetensors file."""
    return Contents(read_tensors(path))


def write_safetensors(contents: Contents, path: Path) -> Path:
    """Write weights to a safetensors file, tied ones under each of their names, so that `load_state_dict` finds all."""
    contents.leave_out("extra", "hyper_parameters", "user", "optimizers", "schedulers")
    raw = [name for name, tensor in contents.weights.items() if tensor.dtype in _WITHOUT_NAME]
    if raw:
        contents.left_out.append(f"the dtype of {', '.join(raw)} (the format has none for it: stored as bytes)")
    return put(path, lambda part: write_plain(contents.weights, part))


def put(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write a new file or folder with `write_new`; raise `CheckpointError` if the path is a URL."""
    if not isinstance(path, Path):
        raise CheckpointError(f"{path}: only instep's own format is written to a URL. Give a path, and copy that.")
    return write_new(path, write)
