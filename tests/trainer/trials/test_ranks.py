"""Two ranks: the same answer, nothing left of the steps, and no rank that waits for one whose memory ran out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from instep import Tuner, seed_everything
from instep.callbacks import BatchSizeFinder, LearningRateFinder
from tests.helpers.spawn import run_ranks
from tests.trainer.trials.toys import Data, Model, different, quiet, trained


def _trained(strategy: str, where: str, find: str, size: int = 4, lr: float = 0.1) -> tuple[dict[str, Any], int, float]:
    seed_everything(1)
    module, data = Model(lr, limit=20, where=where, on_rank=1), Data(size)
    rates = LearningRateFinder(num_training_steps=25)
    callbacks: dict[str, Any] = {"size": BatchSizeFinder("binsearch"), "rate": rates}
    trainer = quiet(
        max_epochs=1,
        devices=2,
        strategy=strategy,
        accumulate_grad_batches=2,
        callbacks=[callbacks[find]] if find in callbacks else [],
    )
    if find == "tuned":
        Tuner(trainer).scale_batch_size(module, datamodule=data, mode="binsearch")
    elif find == "tuned rate":
        Tuner(trainer).lr_find(module, datamodule=data, num_training=25)
    return trained(trainer, module, data), data.hparams.batch_size, module.hparams.lr


WAYS = {"ddp": ("forward", "tuned", "rate"), "fsdp": ("backward", "size", "tuned rate")}
if TorchVersion(torch.__version__) < "2.13":  # there FSDP refuses to go on after a step that ran out of memory
    del WAYS["fsdp"]
"""By strategy: where rank 1 runs out of memory, and who finds the batch size and the learning rate."""


def _rank(folder: Path) -> list[Any]:
    os.chdir(folder)
    return [_ways(strategy, *how) for strategy, how in WAYS.items()]


def _ways(strategy: str, where: str, size: str, rate: str) -> Any:
    one, found, _ = _trained(strategy, where, size)
    other, _, _ = _trained(strategy, where, "", found)
    same_at_size = different(one, other)
    one, _, lr = _trained(strategy, "", rate)
    other, _, _ = _trained(strategy, "", "", lr=lr)
    return strategy, found, same_at_size, lr, different(one, other)


@pytest.mark.dist
def test_all_ranks_agree_on_the_batch_size_and_the_rate_that_were_found(tmp_path: Path) -> None:
    first, second = run_ranks(_rank, 2, tmp_path)
    assert first == second
    for strategy, found, same_at_size, lr, same_at_rate in first:
        assert found == 19, strategy  # 20, where rank 1 runs out of memory, less 5 %
        assert lr != 0.1, strategy
        assert (same_at_size, same_at_rate) == ([], []), strategy
    assert list(tmp_path.rglob("*")) == []
