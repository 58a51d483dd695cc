from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from instep import TrainModule
from instep.errors import DistributedError
from instep.strategies import DDPStrategy
from tests.helpers.spawn import run_ranks
from tests.trainer.test_ranks import loader, quiet


def test_a_rank_without_its_group_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 1)
    DDPStrategy().setup(module, [])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="one of 2, but their process group is gone"):
        DDPStrategy().setup(module, [])


class Accumulating(TrainModule):
    """Two batches per step; gradients are noted after every backward."""

    automatic_optimization = False

    def __init__(self, toggled: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        self.toggled = toggled
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        steps = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=steps) if self.toggled else nullcontext():
            self.manual_backward(self.layer(batch[0]).mean())
        self.gradients.append(self.layer.weight.grad.flatten().tolist())  # type: ignore[union-attr]
        if steps:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(toggled: bool) -> tuple[list[list[float]], list[float]]:
    torch.manual_seed(1)
    module = Accumulating(toggled)
    quiet(max_epochs=1).fit(module, loader(16, 2))
    return module.gradients, module.layer.weight.flatten().tolist()


@pytest.mark.dist
def test_gradients_are_not_reduced_while_accumulating() -> None:
    first, second = run_ranks(train, 2, True)
    assert all((a != b) == (i % 2 == 0) for i, (a, b) in enumerate(zip(first[0], second[0], strict=True)))
    always, _ = run_ranks(train, 2, False)
    assert first[1] == second[1] == pytest.approx(always[1], abs=1e-6)
    assert first[0][1] == pytest.approx(always[0][1], abs=1e-6)
