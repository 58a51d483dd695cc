"""With the global batch held, training means the same on any number of processes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import Plain, StepLosses

GLOBAL_BATCH = 12
# Settings, samples, and the loader's batch size, from which the micro-batches follow. 50 samples leave a tail of 2,
# which is less than three ranks; 36 come out even; 55 leave 7.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "even": ({}, 36, 12),
    "tail": ({}, 50, 12),
    "tail-shared-by-all": ({}, 55, 12),
    "windows": ({}, 50, 3),
    "clipped": ({"gradient_clip_val": 0.05}, 50, 12),
    "clipped-windows": ({"gradient_clip_val": 0.05}, 55, 2),
    "clipped-by-value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, 50, 3),
}


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(settings: dict[str, Any], samples: int, batch_size: int) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses by optimizer step, final weights, and the logged mean of the last epoch."""
    torch.manual_seed(1)
    module, losses = Regression(), StepLosses()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        global_batch_size=GLOBAL_BATCH,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
        **settings,
    )
    trainer.fit(module, DataLoader(Plain(samples), batch_size=batch_size, shuffle=True))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return losses.values, weights, float(trainer.callback_metrics["loss"])


def train_all() -> dict[str, Any]:
    warnings.simplefilter("error")
    return {name: train(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_all()


@pytest.mark.dist
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_losses_agree_with_one_process(world_size: int, alone: dict[str, Any]) -> None:
    ranks = run_ranks(train_all, world_size, timeout_s=120.0)
    for name, (settings, samples, _) in CASES.items():
        losses, weights, mean = alone[name]
        steps = -(-samples // GLOBAL_BATCH) * 3
        assert len(losses) == steps, (name, settings)
        for rank, results in enumerate(ranks):
            got_losses, got_weights, got_mean = results[name]
            assert got_losses == pytest.approx(losses, abs=1e-5), (name, rank)
            assert got_mean == pytest.approx(mean, rel=1e-5), (name, rank)
            for key, value in weights.items():
                torch.testing.assert_close(
                    got_weights[key], value, atol=1e-5, rtol=0, msg=f"{name}, rank {rank}: {key}"
                )
                assert torch.equal(got_weights[key], ranks[0][name][1][key]), f"{name}: {key} differs on rank {rank}"
