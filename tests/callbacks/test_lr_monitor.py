from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import StepLR

from instep.callbacks import Callback, LearningRateMonitor
from instep.errors import SettingError
from instep.trainer.hooks import is_overridden
from tests.callbacks.fakes import FakeSchedulerConfig, FakeTrainer


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]


def fit(monitor: LearningRateMonitor, trainer: FakeTrainer, steps: int = 101, accumulate: int = 1) -> list:
    monitor.on_train_start(trainer, None)
    monitor.on_train_epoch_start(trainer, None)
    for step in range(steps):
        trainer.global_step = step
        for micro in range(accumulate):
            monitor.on_train_batch_start(trainer, None, None, step * accumulate + micro)
    return trainer.loggers[0].records


def test_logs_every_n_steps_once_per_step():
    trainer = FakeTrainer(optimizers=[Adam(parameters(), lr=0.1)])
    monitor = LearningRateMonitor(logging_interval="step")
    records = fit(monitor, trainer, accumulate=3)
    assert records == [({"lr-Adam": 0.1}, 0), ({"lr-Adam": 0.1}, 50), ({"lr-Adam": 0.1}, 100)]
    assert monitor.lrs == {"lr-Adam": [0.1, 0.1, 0.1]}
    assert trainer.metrics.callback == {"lr-Adam": 0.1}
    trainer.optimizers[0].add_param_group({"params": parameters(), "lr": 0.5})
    monitor._log(trainer, "step")
    assert monitor.lrs == {"lr-Adam/pg1": [0.1] * 4, "lr-Adam/pg2": [0.5]}


def test_the_learning_rate_monitor_logs_nothing_by_step_without_an_interval():
    trainer = FakeTrainer(optimizers=[Adam(parameters(), lr=0.1)], log_every_n_steps=0)
    assert fit(LearningRateMonitor(), trainer) == []
    trainer.global_step = 0
    assert fit(LearningRateMonitor("epoch"), trainer) == [({"lr-Adam": 0.1}, 0)]


@pytest.mark.parametrize(("interval", "has"), [("step", True), (None, True), ("epoch", False)])
def test_a_hook_at_every_step_only_where_it_is_used(interval, has):
    assert is_overridden(LearningRateMonitor(interval), "on_train_batch_start", Callback) is has


def test_the_schedulers_interval_decides_by_default():
    first, second = SGD(parameters(), lr=0.5), SGD(parameters(), lr=0.25)
    trainer = FakeTrainer(
        optimizers=[first, second],
        lr_scheduler_configs=[
            FakeSchedulerConfig(StepLR(first, 1), interval="epoch"),
            FakeSchedulerConfig(StepLR(second, 1), name="late", interval="step"),
        ],
    )
    assert fit(LearningRateMonitor(), trainer, steps=1) == [({"lr-SGD": 0.5}, 0), ({"late": 0.25}, 0)]
    trainer.loggers[0].records.clear()
    assert fit(LearningRateMonitor("epoch"), trainer, steps=60) == [({"lr-SGD": 0.5, "late": 0.25}, 0)]


def test_names_of_groups_and_of_equal_optimizers():
    one, two = parameters()
    groups = SGD([{"params": [one], "name": "head"}, {"params": [two], "lr": 0.1}], lr=0.5)
    trainer = FakeTrainer(optimizers=[groups, SGD(parameters(), lr=1.0)])
    ((values, _),) = fit(LearningRateMonitor(log_key_prefix="opt/"), trainer, steps=1)
    assert values == {"opt/lr-SGD/head": 0.5, "opt/lr-SGD/pg2": 0.1, "opt/lr-SGD-1": 1.0}


def test_momentum_and_weight_decay():
    trainer = FakeTrainer(
        optimizers=[Adam(parameters(), lr=torch.tensor(0.5)), SGD(parameters(), lr=1.0, weight_decay=0.25)]
    )
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    ((values, _),) = fit(monitor, trainer, steps=1)
    assert values == {
        "lr-Adam": 0.5,
        "lr-Adam-momentum": 0.9,
        "lr-Adam-weight_decay": 0.0,
        "lr-SGD": 1.0,
        "lr-SGD-momentum": 0.0,
        "lr-SGD-weight_decay": 0.25,
    }
    assert all(type(value) is float for value in values.values())
    assert monitor.lrs == {"lr-Adam": [0.5], "lr-SGD": [1.0]}
    assert monitor.last_momentum_values == {"lr-Adam-momentum": 0.9, "lr-SGD-momentum": 0.0}
    assert monitor.last_weight_decay_values == {"lr-Adam-weight_decay": 0.0, "lr-SGD-weight_decay": 0.25}
    assert trainer.metrics.callback == values

    without = LearningRateMonitor(log_momentum=True)
    with pytest.warns(RuntimeWarning, match="do not have momentum"):
        without.on_train_start(FakeTrainer(optimizers=[Adagrad(parameters())]), None)
    assert without.last_momentum_values == {"lr-Adagrad-momentum": None}


def test_the_learning_rate_monitor_names_what_is_wrong():
    with pytest.raises(SettingError, match="logging_interval"):
        LearningRateMonitor("batch")
    with pytest.raises(SettingError, match="no logger"):
        LearningRateMonitor().on_train_start(FakeTrainer(loggers=[]), None)
    one, two = parameters()
    twins = SGD([{"params": [one], "name": "a"}, {"params": [two], "name": "a"}], lr=0.5)
    with pytest.raises(SettingError, match="two of SGD are called 'a'"):
        LearningRateMonitor().on_train_start(FakeTrainer(optimizers=[twins]), None)


def test_a_long_fit_keeps_the_last_rates(monkeypatch):
    monkeypatch.setattr("instep.callbacks.lr_monitor._KEPT", 3)
    trainer = FakeTrainer(optimizers=[Adam(parameters(), lr=0.1)])
    monitor = LearningRateMonitor(logging_interval="step")
    monitor.on_train_start(trainer, None)
    for number in range(11):
        trainer.optimizers[0].param_groups[0]["lr"] = float(number)
        monitor._log(trainer, "step")
    assert monitor.lrs == {"lr-Adam": [6.0, 7.0, 8.0, 9.0, 10.0]}
