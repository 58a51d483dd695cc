"""Contents that all formats of checkpoints share; reading and writing instep's own files and safetensors."""

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
    """Return the tensors of a safetensors file, or of several that hold parts of them.

    Args:
        paths: the files.

    Returns:
        Name -> shape, dtype (torch's name), bytes, `same_as` for one that is stored under another name, and `parts`,
        how many, where it is not in one piece.

    Raises:
        CorruptCheckpointError: one is not a whole safetensors file.
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
        weights: the model's, by name.
        extra: what the model's state has beside tensors.
        hyper_parameters: the module's arguments.
        hparams_name: the one argument that they are, where they are one.
        epoch: from 0.
        global_step: optimizer steps done.
        user: what `on_save_checkpoint` added.
        optimizers: by parameter name, as in instep's own checkpoints.
        schedulers: their state dicts.
        left_out: what the source has beside this, for people; writers add what they cannot write.
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
        """Record each field that is not empty as left out."""
        self.left_out += [name.replace("_", " ") for name in names if getattr(self, name)]

    def numbered_optimizers(self) -> list[dict[str, Any]]:
        """Return the states of optimizers in torch's form: parameters numbered over all groups."""
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
        """Keep the values that torch can read without running code, and record the others as left out."""
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
        path: its folder.
        which: "live" or "averaged" weights; None: the plain ones.
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
    """Write a checkpoint of kind "weights", for `load_from_checkpoint`; the attempt is added to its name.

    Raises:
        CheckpointError: there is an attempt of that name already.
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
    """Read a file of weights."""
    return Contents(read_tensors(path))


def write_safetensors(contents: Contents, path: Path) -> Path:
    """Write the weights; a tied weight under each of its names, so that `load_state_dict` misses none."""
    contents.leave_out("extra", "hyper_parameters", "user", "optimizers", "schedulers")
    raw = [name for name, tensor in contents.weights.items() if tensor.dtype in _WITHOUT_NAME]
    if raw:
        contents.left_out.append(f"the dtype of {', '.join(raw)} (the format has none for it: stored as bytes)")
    return put(path, lambda part: write_plain(contents.weights, part))


def put(path: Path, write: Callable[[Path], Any]) -> Path:
    """Write to a path on a local disk with `write_new`; a URL is refused."""
    if not isinstance(path, Path):
        raise CheckpointError(f"{path}: only instep's own format is written to a URL. Give a path, and copy that.")
    return write_new(path, write)
