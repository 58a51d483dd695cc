"""Read weights from folders of DeepSpeed's `save_checkpoint`, without running code from them.

Such a folder has the file `latest` and a folder for each tag, with the files `*_model_states.pt` and
`*_optim_states.pt` of each rank, which torch.save has written. They are read with `weights_only=True`. Besides tensors
they contain objects of four classes of DeepSpeed (its loss scalers, an enum and an address). An empty class, and int
for the enum, replace these classes, so that DeepSpeed need not be installed. The float32 weights are stored in flat
partitions, one per rank. The optimizer's moments and steps are not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoint.edge import reading
from instep.checkpoint.foreign.torch_files import read_torch_file
from instep.checkpoint.names import inside
from instep.errors import CheckpointError, CorruptCheckpointError
from instep.utils.untrusted_files import LEASE_BYTES, read_regular

_OPTIMIZER = "optim_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


class _Unread:
    """Empty class in place of a class of DeepSpeed whose objects are not needed for the weights."""


_STAND_INS: list[Any] = [
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


def find_folder(path: Path) -> Path | None:
    """Return the folder that `path/latest` names, or else `path`; None if DeepSpeed's files are not in that folder."""
    latest = path / "latest"
    tagged = path
    if isinstance(path, Path) and latest.is_file():
        with reading(latest, "names no folder"):
            tagged = inside(path, read_regular(latest, LEASE_BYTES).decode().strip(), latest)
    return tagged if tagged.is_dir() and any(file.name.endswith(_OPTIMIZER) for file in tagged.iterdir()) else None


def open_folder(folder: Path, roots: tuple[str, ...]) -> dict[str, Tensor]:
    """Read the float32 weights, buffers and frozen parameters of a DeepSpeed folder.

    Args:
        folder: folder that `find_folder` returned.
        roots: not used, since DeepSpeed always stores the weights under the same keys.

    Returns:
        Tensors on the CPU by name; a tied tensor is under each of its names.

    Raises:
        CheckpointError: the folder cannot be read without running code, or its format is not supported.
        CorruptCheckpointError: files are missing or inconsistent.
    """
    names = [file.name for file in folder.iterdir()]
    with torch.serialization.safe_globals(_STAND_INS):
        states = [read_torch_file(folder / name) for name in _in_order(names, _OPTIMIZER, folder)]
        models = [read_torch_file(folder / name) for name in _in_order(names, "model_states.pt", folder)]
    with reading(folder, "has partitions that do not make up the weights"):
        return _put_together(folder, [state["optimizer_state_dict"] for state in states], models)


def _put_together(folder: Path, optimizers: Sequence[Any], models: Sequence[Any]) -> dict[str, Tensor]:
    first = optimizers[0]
    if not models or "zero_stage" not in first:
        raise CheckpointError(f"{folder} was not written with ZeRO stage 1, 2 or 3", path=folder)
    counts = first["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else int(counts)
    if ranks != len(optimizers):
        raise CorruptCheckpointError(
            f"{folder} was written by {ranks} processes and holds the files of {len(optimizers)}. Files of several "
            "runs in one tag, or of some ranks only, do not make up a checkpoint.",
            path=folder,
        )
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
    if int(first["zero_stage"]) == 3:
        weights = _stage_3(shapes, [_runs(state["fp32_flat_groups"]) for state in optimizers])
        frozen = _frozen_of_stage_3(models)
    else:
        parts = [state["single_partition_of_fp32_groups"] for state in optimizers]
        weights = _stage_1_and_2(shapes, parts, first.get("param_alignment_paddings"))
        frozen = {}  # in stages 1 and 2, the module's state has each frozen parameter whole, not in parts
    cut = {name for group in shapes for name in group} | frozen.keys()
    rest = {name: value for name, value in models[0]["module"].items() if name not in cut and isinstance(value, Tensor)}
    found = {**rest, **frozen, **weights}
    for name, same in dict(models[0].get("shared_params", {})).items():
        if same in found:
            found[name] = found[same]
    return found


def _stage_1_and_2(shapes: Sequence[Mapping[str, Any]], parts: Sequence[Any], gaps: Any) -> dict[str, Tensor]:
    """Join ZeRO stage 1 and 2 weights: each parameter group is one flat tensor, which is partitioned over ranks.

    `gaps` has the number of elements between each parameter and the next one; None if there are no gaps.
    """
    found: dict[str, Tensor] = {}
    for index, group in enumerate(shapes):
        flat = torch.cat([rank[index].reshape(-1) for rank in parts]).float()
        begin = 0
        for position, (name, shape) in enumerate(group.items()):
            found[name] = flat.narrow(0, begin, math.prod(shape)).view(shape).clone()
            begin += math.prod(shape) + (max(0, gaps[index][position]) if gaps else 0)
    return found


def _stage_3(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Tensor]) -> dict[str, Tensor]:
    """Join ZeRO stage 3 weights: each rank's tensor has a part of every parameter, one part after the other."""
    found: dict[str, Tensor] = {}
    begin = 0
    for name, shape in (item for group in shapes for item in group.items()):
        count = math.prod(shape)
        size = -(-count // len(ranks))
        found[name] = torch.cat([run.narrow(0, begin, size) for run in ranks])[:count].view(shape).float()
        begin += size
    return found


def _frozen_of_stage_3(models: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    shapes = models[0].get("frozen_param_shapes") or {}
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        flat = torch.cat([model["frozen_param_fragments"][name].reshape(-1) for model in models])
        found[name] = flat[: math.prod(shape)].view(tuple(shape))
    return found


def _runs(groups: Sequence[Tensor] | Tensor) -> Tensor:
    return groups if isinstance(groups, Tensor) else torch.cat([group.reshape(-1) for group in groups])


def _in_order(names: Sequence[str], ending: str, folder: Path) -> list[str]:
    """Sort the files of all ranks by rank number. (Sorted by name, rank 10 would come before rank 2.)"""

    def rank(name: str) -> tuple[int, ...]:
        found = _RANK.search(name)
        if found is not None and int(found[2]):
            raise CheckpointError(f"{folder} was written with tensor parallelism, which is not read here", path=folder)
        return (int(found[1]),) if found is not None else (0,)

    return sorted((name for name in names if name.endswith(ending)), key=rank)
