"""Weights out of folders laid out as DeepSpeed lays them out, of stand-ins for its classes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from instep.checkpoint import load_weights
from instep.errors import CheckpointError, CorruptCheckpointError

WEIGHT, BIAS, FROZEN = torch.arange(6.0).view(2, 3), torch.tensor([7.0, 8.0, 9.0]), torch.tensor([1.5, 2.5, 3.5])
SHAPES = [OrderedDict(weight=WEIGHT.shape), OrderedDict(bias=BIAS.shape)]


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Classes that pickle under DeepSpeed's names, for as long as files are written."""
    made: dict[str, Any] = {}
    for module, name in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ):
        made[name] = type(name, (), {"__module__": module})
    module = "deepspeed.runtime.zero.config"
    made["ZeroStageEnum"] = IntEnum("ZeroStageEnum", {"one": 1, "two": 2, "three": 3}, module=module)
    for it in made.values():
        parts = it.__module__.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules[it.__module__], it.__name__, it, raising=False)
    return made


def write(root: Path, classes: dict[str, Any], stage: int, ranks: int = 2) -> None:
    """What two processes write: `weight` and `bias` are of two groups, `same` is tied to `bias`."""
    folder = root / "tag"
    folder.mkdir(parents=True)
    (root / "latest").write_text("tag")
    scaler, address = classes["LossScaler"](), classes["fragment_address"]()
    scaler.cur_scale = address.start = 1
    pairs = [WEIGHT.flatten().chunk(2), torch.cat([BIAS, torch.zeros(1)]).chunk(2)]
    for rank in range(ranks):
        prefix = f"zero_pp_rank_{rank}_mp_rank_00_"
        own = [pair[rank].clone() for pair in pairs]
        held = {"fp32_flat_groups": [torch.cat(own)]} if stage == 3 else {"single_partition_of_fp32_groups": own}
        optimizer = {
            "zero_stage": classes["ZeroStageEnum"](stage),
            "partition_count": 2 if stage == 3 else [2, 2],
            "loss_scaler": scaler,
            "param_slice_mappings": [{"weight": address}],
            **held,
        }
        torch.save({"optimizer_state_dict": optimizer}, folder / f"{prefix}optim_states.pt")
        empty = torch.zeros(0) if stage == 3 else torch.full((3,), -1.0)
        module = {"weight": empty, "bias": empty, "same": empty, "count": torch.tensor(5)}
        module["frozen"] = torch.zeros(0) if stage == 3 else FROZEN
        state = {
            "module": module,
            "param_shapes": SHAPES,
            "shared_params": {"same": "bias"},
            "frozen_param_shapes": {"frozen": FROZEN.shape},
            "frozen_param_fragments": {"frozen": torch.cat([FROZEN, torch.zeros(1)]).chunk(2)[rank].clone()},
        }
        if stage == 3 or rank == 0:
            torch.save(state, folder / f"{prefix if stage == 3 else 'mp_rank_00_'}model_states.pt")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", ["", "tag"])
def test_weights_are_put_together(stage: int, place: str, tmp_path: Path, classes: dict[str, Any]) -> None:
    write(tmp_path, classes, stage)
    weights = load_weights(tmp_path / place)
    expected = {"weight": WEIGHT, "bias": BIAS, "same": BIAS, "frozen": FROZEN, "count": torch.tensor(5)}
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def test_files_of_some_ranks_are_no_checkpoint(tmp_path: Path, classes: dict[str, Any]) -> None:
    write(tmp_path, classes, 2, ranks=1)
    with pytest.raises(CorruptCheckpointError, match="written by 2 processes and holds the files of 1"):
        load_weights(tmp_path)


def test_files_without_partitions_are_no_checkpoint(tmp_path: Path, classes: dict[str, Any]) -> None:
    write(tmp_path, classes, 2)
    file = tmp_path / "tag" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=False)
    del state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    torch.save(state, file)
    with pytest.raises(CorruptCheckpointError, match="do not make up the weights: KeyError: 'single_partition"):
        load_weights(tmp_path)


def test_code_is_not_run(tmp_path: Path, classes: dict[str, Any]) -> None:
    write(tmp_path, classes, 2)

    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"optimizer_state_dict": Runs()}, tmp_path / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="without running code"):
        load_weights(tmp_path)
    assert not (tmp_path / "ran").exists()
