"""A run of three ranks that is taken up again has the bits of one that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.callbacks import ModelCheckpoint
from instep.checkpoint import CheckpointStore
from instep.strategies import DDPStrategy
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet


class Shuffled(Toy):
    """Its layers are made in another order than they are used in."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer, self.first, self.second = nn.Linear(64, 1), nn.Linear(4, 64), nn.Linear(64, 64)

    def loss(self, batch: Any) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(batch[0]))))
        return nn.functional.mse_loss(self.layer(hidden).squeeze(-1), batch[1])


def weights(strategy: DDPStrategy, accumulate: int, ckpt_path: str | None = None, **more: Any) -> Tensor:
    module = Shuffled()
    trainer = quiet(max_steps=5, strategy=strategy, accumulate_grad_batches=accumulate, **more)
    trainer.fit(module, loader(96, 4), ckpt_path=ckpt_path)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "windows": ({}, 2),
    "views": ({"gradient_as_bucket_view": True}, 1),
    "zero": ({"zero_redundancy_optimizer": True}, 1),
}


def straight_and_resumed(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for name, (options, accumulate) in CASES.items():
        saver = ModelCheckpoint(dirpath=folder / name, every_n_train_steps=1, save_top_k=-1)
        strategies = [DDPStrategy(bucket_cap_mb=0.01, **options) for _ in range(2)]
        straight = weights(strategies[0], accumulate, callbacks=[saver], enable_checkpointing=True)
        path = next(str(it.path) for it in CheckpointStore(folder / name).scan() if it.step == 2)
        found[name] = straight, weights(strategies[1], accumulate, path)
    return found


@pytest.mark.dist
def test_a_resumed_run_sums_in_the_order_of_the_first_one(tmp_path: Path) -> None:
    for rank in run_ranks(straight_and_resumed, 3, tmp_path):
        for name, (straight, resumed) in rank.items():
            assert torch.equal(straight, resumed), name
