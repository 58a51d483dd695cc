from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep import Trainer
from instep.errors import SettingError
from instep.strategies.base import sync_batchnorm
from tests.helpers import gpu
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet


class Normalised(Toy):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def running_mean(module: Normalised) -> list[float]:
    norm: Any = module.layer[1]
    return norm.running_mean.tolist()


def converted() -> dict[str, Any]:
    """What becomes of a module for a GPU, and what a CPU says to it."""
    from instep.state import PartialState  # late: made in the rank

    PartialState(cpu=True)
    module = Normalised()
    before, statistics = module.state_dict(), module.layer[1].running_mean
    with pytest.raises(SettingError, match=r"works on cuda, xpu, hpu, and this is cpu.*GroupNorm"):
        sync_batchnorm(module, torch.device("cpu"))
    untouched = type(module.layer[1]) is nn.BatchNorm1d
    sync_batchnorm(module, torch.device("cuda"))
    with pytest.raises(SettingError, match="and this is cpu"):
        quiet(max_epochs=1, sync_batchnorm=True)
    return {
        "untouched": untouched,
        "kind": type(module.layer[1]).__name__,
        "names": list(module.state_dict()) == list(before),
        "statistics": module.layer[1].running_mean is statistics,
    }


@pytest.mark.dist
def test_names_and_statistics_stay() -> None:
    for found in run_ranks(converted, 2):
        assert found == {"untouched": True, "kind": "SyncBatchNorm", "names": True, "statistics": True}


def test_a_cpu_is_refused_at_construction_and_one_process_needs_nothing() -> None:
    with pytest.raises(SettingError, match=r"sync_batchnorm=True: torch's SyncBatchNorm works on cuda") as caught:
        Trainer(accelerator="cpu", devices=2, sync_batchnorm=True)
    assert caught.value.field == "sync_batchnorm"
    module = Normalised()
    quiet(max_steps=1, sync_batchnorm=True).fit(module, loader())
    assert type(module.layer[1]) is nn.BatchNorm1d


def on_two_gpus() -> list[float]:
    module = Normalised()
    Trainer(
        accelerator="gpu", devices=2, max_steps=1, sync_batchnorm=True, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, loader(16, 4))  # fmt: skip
    return running_mean(module)


@pytest.mark.gpu
@pytest.mark.dist
@gpu.needs_two
def test_statistics_are_those_of_the_whole_batch() -> None:
    module = Normalised()
    quiet(max_steps=1).fit(module, loader(16, 8))
    expected = running_mean(module)
    for found in run_ranks(on_two_gpus, 2):
        assert found == pytest.approx(expected, abs=1e-5)
