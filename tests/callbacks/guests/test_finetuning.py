"""Layers that join the training later, on one rank and several, stopped and taken up again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from instep import Resume, Trainer, TrainModule
from instep.callbacks import BackboneFinetuning, BaseFinetuning, Callback, LearningRateMonitor
from instep.errors import CheckpointError, HookError, Preempted, SettingError
from instep.strategies import DDPStrategy
from tests.helpers.spawn import run_ranks
from tests.trainer.resuming import StopAt, Warmup, _same
from tests.trainer.toys import Toy, assert_same, loader, quiet, weights

SCHEDULES: dict[str, Any] = {
    "none": None,
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "lambda": lambda o: lrs.LambdaLR(o, Warmup()),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 0.02, total_steps=40),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.001, 0.02, step_size_up=5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, 2, eta_min=1e-4),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=[1e-4], threshold=0.9),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=4), lrs.CosineAnnealingLR(o, 20, eta_min=1e-4)], milestones=[4]
    ),
}


class Tuned(TrainModule):
    """A backbone that is to join later, and a head."""

    def __init__(self, schedule: str = "none", norm: bool = True) -> None:
        super().__init__()
        self.schedule = schedule
        layers = [nn.Linear(4, 8), *[nn.BatchNorm1d(8)] * norm, nn.Tanh(), nn.Linear(8, 4)]
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.backbone(x)).squeeze(-1), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.head(self.backbone(x)).squeeze(-1), y))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
        if self.schedule == "none":
            return optimizer
        config = {"scheduler": SCHEDULES[self.schedule](optimizer), "interval": "step"}
        monitor = {"monitor": "loss"} if self.schedule == "plateau" else {}
        return {"optimizer": optimizer, "lr_scheduler": config | monitor}


class ByLayer(BaseFinetuning):
    """The last layer of the backbone joins at epoch 1, the first at epoch 2; BatchNorm waits for it."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[-1], optimizer)
        if epoch == 2:
            self.unfreeze_and_add_param_group([module.backbone[:-1]], optimizer, lr=0.003)


def run(
    root: Path, callback: Callback, schedule: str, *others: Callback, norm: bool = True, **settings: Any
) -> tuple[Tuned, Trainer]:
    torch.manual_seed(1)
    module = Tuned(schedule, norm=norm)
    resume = settings.pop("resume", None)
    trainer = quiet(
        **{"max_epochs": 4, "default_root_dir": root, "trigger_every": 1, "enable_checkpointing": True, **settings},
        callbacks=[callback, *others],
    )
    try:
        trainer.fit(module, loader(24, 4), loader(8, 4), ckpt_path="auto", resume=resume)
    except Preempted:
        assert others
    return module, trainer


@pytest.mark.parametrize(("kind", "schedule"), [("layers", "one-cycle"), ("backbone", "lambda"), ("layers", "plateau")])
def test_a_stopped_run_has_the_groups_again_and_ends_with_the_same_bits(
    tmp_path: Path, kind: str, schedule: str
) -> None:
    backbone = partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.2)
    make = ByLayer if kind == "layers" else backbone
    expected, whole = run(tmp_path / "whole", make(), schedule)
    assert len(whole.optimizers[0].param_groups) == (3 if make is ByLayer else 2)
    assert all(p.requires_grad for p in expected.parameters())
    for stop in (3, 8, 17):  # 6 steps an epoch: within it, at its end, after each new group
        run(tmp_path / "stopped", make(), schedule, StopAt(stop))
    got, trainer = run(tmp_path / "stopped", make(), schedule)
    assert_same(weights(got), weights(expected))
    for one, other in zip(got.buffers(), expected.buffers(), strict=True):
        assert torch.equal(one, other)
    _same(trainer.optimizers[0].state_dict(), whole.optimizers[0].state_dict(), "optimizer")
    configs = [t.lr_scheduler_configs for t in (trainer, whole)]
    _same(*[[c.scheduler.state_dict() for c in config] for config in configs], "schedule")


class Rates(Callback):
    """The learning rates of all groups, step by step."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append([float(group["lr"]) for group in trainer.optimizers[0].param_groups])


@pytest.mark.parametrize("schedule", ["lambda", "one-cycle", "cyclic", "sequential"])
def test_a_new_group_follows_the_schedule_of_the_first(tmp_path: Path, schedule: str) -> None:
    rates = Rates()
    run(tmp_path, ByLayer(), schedule, rates)
    rows = rates.rows[6:12]  # epoch 1: the second group began with a tenth
    assert [row[1] for row in rows] == pytest.approx([row[0] / 10 for row in rows], rel=0.05)  # eta_min
    assert len({row[0] for row in rows}) > 1
    assert rates.rows[12][2] == 0.003


def test_the_backbones_rate_grows_to_that_of_the_rest(tmp_path: Path) -> None:
    rates = Rates()
    run(tmp_path, BackboneFinetuning(1, lambda epoch: epoch), "none", rates, max_epochs=5, enable_checkpointing=False)
    assert [row[-1] for row in rates.rows[6::6]] == pytest.approx([0.001, 0.003, 0.01, 0.01])
    rates = Rates()
    callback = BackboneFinetuning(1, backbone_initial_lr=0.004, should_align=False)
    run(tmp_path, callback, "lambda", rates, max_epochs=3, enable_checkpointing=False)
    first, second = rates.rows[6:12], rates.rows[12:]
    assert [row[-1] for row in rates.rows[6::6]] == pytest.approx([0.004, 0.008])
    for rows in (first, second):  # within an epoch it follows the schedule
        assert [row[1] / rows[0][1] for row in rows] == pytest.approx([row[0] / rows[0][0] for row in rows])


def test_a_second_fit_goes_on_with_what_was_unfrozen(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Tuned(norm=False)
    trainer = quiet(max_epochs=3, default_root_dir=tmp_path, callbacks=[ByLayer()])
    trainer.fit(module, loader(24, 4))
    trainer.validate(module, loader(8, 4), verbose=False)
    assert all(p.requires_grad for p in module.parameters())  # no evaluation freezes
    trainer.max_epochs = 4
    before = weights(module)
    trainer.fit(module, loader(24, 4))
    assert len(trainer.optimizers[0].param_groups) == 3
    assert all(not torch.equal(before[name], p) for name, p in module.named_parameters())
    other = Tuned()
    quiet(max_epochs=1, callbacks=list(trainer.callbacks)).fit(other, loader(24, 4))
    assert not other.backbone[0].weight.requires_grad  # another module begins anew


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HookError, match="no freeze_before_training"):
        quiet(max_epochs=1, callbacks=[BaseFinetuning()]).fit(Tuned(), loader())
    with pytest.raises(SettingError, match="`backbone` attribute"):
        quiet(max_epochs=1, callbacks=[BackboneFinetuning()]).fit(Toy(), loader())
    with pytest.raises(SettingError, match="unfreeze_backbone_at_epoch"):
        BackboneFinetuning(-1)
    with pytest.raises(SettingError, match="lambda_func=2: expected a function"):
        BackboneFinetuning(lambda_func=2)  # type: ignore[arg-type]

    class Engine(DDPStrategy):
        takes_new_groups = False

    trainer = quiet(max_epochs=1, strategy=Engine(), callbacks=[ByLayer()])
    trainer.validate(Tuned(), loader(24, 4))
    with pytest.raises(SettingError, match="does not support running with the Engine strategy"):
        trainer.fit(Tuned(), loader(24, 4))
    run(tmp_path, ByLayer(), "none", StopAt(14))

    class Renamed(ByLayer):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            state_dict["internal_optimizer_metadata"][0][0]["params"][0] = "trunk.weight"
            super().load_state_dict(state_dict)

        @property
        def state_key(self) -> str:
            return "ByLayer"

    gone = pytest.raises(CheckpointError, match="of the checkpoint had ByLayer, which this one does not have")
    with gone, pytest.warns(UserWarning, match="left out: ByLayer"):
        run(tmp_path, StopAt(20), "none")
    with pytest.raises(CheckpointError, match=r"parameters that Tuned does not have: trunk\.weight"):
        run(tmp_path, Renamed(), "none")
    module, trainer = run(tmp_path, ByLayer(), "none", resume=Resume.weights(), max_epochs=1, default_root_dir=tmp_path)
    assert not module.backbone[0].weight.requires_grad


# ---- several ranks


def tune_on_ranks(root: Path) -> dict[str, Any]:
    def tune(folder: Path, *others: Callback, **settings: Any) -> Any:
        return run(folder, ByLayer(), "lambda", *others, norm=False, devices="auto", **settings)

    results: dict[str, Any] = {}
    ways: dict[str, list[dict[str, Any]]] = {
        "ddp": [{"strategy": "ddp"}] * 3,
        "bf16": [{"strategy": "fsdp", "precision": "bf16-mixed"}] * 3,
        "changed": [
            {"strategy": "ddp"},
            {"strategy": "fsdp"},
            {"strategy": DDPStrategy(zero_redundancy_optimizer=True)},
        ],
    }
    for name, parts in ways.items():
        for stop, settings in zip((4, 8), parts, strict=False):  # 3 steps an epoch
            tune(root / name, StopAt(stop), **settings)
        _, trainer = tune(root / name, **parts[-1])
        results[name] = trainer.strategy.full_model_state()
    for name in ("ddp", "bf16"):
        _, trainer = tune(root / f"whole-{name}", **ways[name][0])
        results[f"whole-{name}"] = trainer.strategy.full_model_state()
    return results


@pytest.mark.dist
def test_ranks_average_the_gradients_of_what_joins(tmp_path: Path) -> None:
    first, _ = run_ranks(tune_on_ranks, 2, tmp_path)
    torch.manual_seed(1)
    alone = Tuned("lambda", norm=False)
    quiet(max_epochs=4, callbacks=[ByLayer()]).fit(alone, loader(24, 8), loader(8, 4))
    for name in ("ddp", "changed"):
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(first[name][key], value, atol=1e-6, rtol=1e-5)
    for name in ("ddp", "bf16"):
        assert_same(first[name], first[f"whole-{name}"])


@pytest.mark.parametrize("order", [1, -1])
def test_a_monitor_sees_the_rates_of_the_epoch_at_any_place_in_the_list(order: int) -> None:
    monitor = LearningRateMonitor("epoch")
    callbacks = [monitor, BackboneFinetuning(1)][::order]
    quiet(max_epochs=3, logger="csv", callbacks=callbacks).fit(Tuned(), loader())
    assert monitor.lrs["lr-SGD/pg2"] == pytest.approx([0.001, 0.002])
