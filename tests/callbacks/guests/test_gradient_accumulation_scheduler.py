from __future__ import annotations

from typing import Any

import pytest
import torch

from instep import TrainModule
from instep.callbacks import Callback, GradientAccumulationScheduler
from instep.errors import SettingError, UsageError
from tests.trainer.toys import ManualToy, Toy, loader, quiet


@pytest.mark.parametrize(
    "scheduling, message",
    [
        ({}, "is empty"),
        ({1: 2, -3: 4}, "Epoch should be an int"),
        ({0: 2, "2": 1}, "Epoch should be an int"),
        ({1: 0}, "Accumulation factor should be an int"),
        ({1: True}, "Accumulation factor should be an int"),
    ],
)
def test_wrong_accumulation_schedules_are_refused(scheduling: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        GradientAccumulationScheduler(scheduling)


class Steps(Callback):
    """The number of micro-batches of each optimizer step, and what the Trainer said."""

    def __init__(self) -> None:
        self.windows: list[int] = []
        self.said: list[int] = []

    def on_train_epoch_start(self, trainer: Any, module: TrainModule) -> None:
        self.begin = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.position.window_batch == batch_idx + 1:
            self.windows.append(batch_idx + 1 - self.begin)
            self.said.append(trainer.accumulate_grad_batches)
            self.begin = batch_idx + 1


class Reckoned(Toy):
    """A schedule that needs the number of steps when the optimizer is made."""

    def configure_optimizers(self) -> Any:
        self.total = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_windows_change_with_the_epoch() -> None:
    steps, module = Steps(), Reckoned()
    trainer = quiet(max_epochs=4, callbacks=[GradientAccumulationScheduler({1: 4, 3: 2}), steps])
    trainer.fit(module, loader(20, 2))
    assert steps.windows == [1] * 10 + [4, 4, 2] * 2 + [2] * 5
    assert steps.said == [1] * 10 + [4] * 6 + [2] * 5
    assert module.total == trainer.global_step == trainer.estimated_stepping_batches == 21
    assert trainer.accumulate_grad_batches == 1, "the argument again"


class LateSetter(Callback):
    def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> None:
        trainer.accumulate_grad_batches = 2


class Newton(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    "settings, module, error, message",
    [
        ({"accumulate_grad_batches": 2}, Toy, SettingError, "`accumulate_grad_batches` and are using the"),
        ({"global_batch_size": 4}, Toy, SettingError, "derives the accumulation"),
        ({"callbacks": [GradientAccumulationScheduler({0: n}) for n in (1, 2)]}, Toy, SettingError, "two GradientAcc"),
        ({}, ManualToy, UsageError, "no effect in manual"),
        ({}, Newton, SettingError, "evaluates the loss within its step"),
        ({"callbacks": [LateSetter()]}, Toy, UsageError, "on_train_epoch_start"),
    ],
)
def test_what_the_accumulation_scheduler_cannot_serve_is_refused_before_the_first_step(
    settings: Any, module: Any, error: type, message: str
) -> None:
    callbacks = settings.pop("callbacks", [GradientAccumulationScheduler({2: 2})])
    trainer = quiet(max_epochs=3, callbacks=callbacks, **settings)
    with pytest.raises(error, match=message):
        trainer.fit(module(), loader(8, 2))
    assert trainer.global_step == 0
