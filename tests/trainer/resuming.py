"""Runs that are stopped and taken up again, held against a run that nobody stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, Dataset, IterableDataset

from instep import PartialState, Trainer, TrainModule, schedules
from instep.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from instep.data import CombinedLoader
from instep.errors import Preempted
from instep.loggers import Logger
from instep.utils.seed import rng_state
from tests.trainer.toys import Mean

SAMPLES, VALIDATION_SAMPLES, EPOCHS = 22, 7, 3


@dataclass(frozen=True)
class Case:
    """One way to train; the defaults have shuffling, dropout, augmentation, a clip and epoch means."""

    data: str = "map"
    workers: int = 0
    accumulate: int | dict[int, int] = 1  # by epoch
    batch_size: int = 4
    schedule: str = "step"
    validate: float | int = 1.0
    across_epochs: bool = False
    precision: str = "32-true"
    seed_samples: bool = False
    monitor: bool = False
    every_n_train_steps: int | None = None
    background: bool = False  # with every_n_train_steps; keeps all
    global_batch_size: int | dict[int, int] | None = None
    log_every: int = 3
    epochs: int = EPOCHS
    optimizer: str = "adamw"
    scheduler: str = "exponential"
    scaler: bool = False
    callbacks: bool = False
    compiled: str = ""
    torchmetrics: bool = False


class Augmented(Dataset[Any]):
    """Samples that are disturbed by python's, numpy's and torch's global generators."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.x = torch.randn(length, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(np.random.rand()) + torch.rand(4)
        return self.x[index] + 0.1 * noise, self.y[index], index


class Plain(Augmented):
    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Stream(IterableDataset[Any]):
    """The same without a length, shuffled while it is read."""

    def __init__(self, length: int) -> None:
        self.data = Augmented(length)

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(len(self.data)).tolist():
            yield self.data[index]


class StatefulStream(IterableDataset[Any]):
    """Goes on where its state says; its order and its noise belong to its state, which lives on over epochs.

    Each rank has another order.
    """

    def __init__(self, length: int) -> None:
        self.data = Plain(length)
        self.place = 0
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.data):
            self.place += 1
            yield self.data[(self.place * 5 + self.passes * 3 + PartialState().process_index) % len(self.data)]
        self.place = 0
        self.passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.passes = state["place"], state["passes"]


def train_loader(case: Case) -> Any:
    options: dict[str, Any] = {"batch_size": case.batch_size, "num_workers": case.workers}
    if case.workers:
        options["multiprocessing_context"] = "fork"  # the default of Python 3.14, forkserver, is slow
    if case.data == "map":
        return DataLoader(Augmented(SAMPLES), shuffle=True, **options)
    if case.data == "plain":
        return DataLoader(Plain(SAMPLES), shuffle=True, **options)
    if case.data == "stream":
        return DataLoader(Stream(SAMPLES), **options)
    if case.data == "stateful":
        return DataLoader(StatefulStream(SAMPLES), **options)
    if case.data == "torchdata":
        # late: only these cases pay for them
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        # Its workers' random generators are no part of its state.
        data = Plain(SAMPLES) if case.workers else Augmented(SAMPLES)
        if not dist.is_initialized():
            return StatefulDataLoader(data, shuffle=True, **options)
        return StatefulDataLoader(data, sampler=StatefulDistributedSampler(data), **options)
    if case.data == "combined":
        both = [DataLoader(Augmented(n), shuffle=True, **options) for n in (SAMPLES, 9)]
        return CombinedLoader({"long": both[0], "short": both[1]}, "max_size_cycle")
    raise AssertionError(case.data)


class Net(TrainModule):
    """Dropout, random numbers in the step, step and epoch values; `seen` has the indices of every batch."""

    def __init__(
        self,
        schedule: str = "step",
        dropout: float = 0.3,
        optimizer: str = "adamw",
        scheduler: str = "exponential",
        torchmetrics: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.average = _mean_metric() if torchmetrics else Mean()
        self.seen: list[list[int]] = []

    def setup(self, stage: str) -> None:
        if stage == "fit":  # makes the loaders, before optimizers and all the rest are restored
            assert self.trainer.estimated_stepping_batches > 0

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", random.random() + torch.rand(()).item(), reduce_fx="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        loss = torch.zeros(())
        for x, y, index in parts:
            loss = loss + nn.functional.mse_loss(self.net(x).float(), y)
            self.seen.append(index.tolist())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.average.update(loss.detach())
        self.log("average", self.average, on_step=False, on_epoch=True)
        self.log("noise", random.random() + float(np.random.rand()))
        if batch_idx % 4 == 0:
            self.log("seldom", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x).float(), y), on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", outputs["loss"] * 2, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.hparams.optimizer](self.parameters())
        scheduler, monitor = SCHEDULERS[self.hparams.scheduler](optimizer), MONITORS.get(self.hparams.scheduler)
        config = {"scheduler": scheduler, "interval": self.hparams.schedule, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": config}


def _mean_metric() -> Any:
    from torchmetrics import MeanMetric  # late: it takes longer to import than torch

    return MeanMetric()


class Warmup:
    """A factor that keeps a state, as users' callables for LambdaLR may."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / 5) * 0.99**self.calls


def _warmup_cosine(optimizer: Any) -> Any:
    parts = [lrs.LinearLR(optimizer, 0.1, total_iters=4), lrs.CosineAnnealingLR(optimizer, 20, eta_min=1e-4)]
    return lrs.SequentialLR(optimizer, parts, milestones=[4])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.3),
    "step-plateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.9, patience=1, cooldown=1),
    "sequential": _warmup_cosine,
    "lambda": lambda o: lrs.LambdaLR(o, Warmup()),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 0.02, total_steps=40),
    "named": lambda o: schedules.make("wsd", o, total_steps=14, warmup_steps=4, decay_steps=0.5),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4, 2),
}
MONITORS = {"plateau": "val_loss_epoch", "step-plateau": "loss_step"}


class Average(Callback):
    """An average of the weights, with a state of tensors."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.updates = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.updates += 1
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.weights.setdefault(name, torch.zeros_like(value)).lerp_(value, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights, self.updates = state_dict["weights"], state_dict["updates"]


class Scaled(Callback):
    """Gives a run on a CPU a gradient scaler whose factor grows every third step."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        trainer.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


class StopAt(Callback):
    """Sets `preempted` right after a step; with `trigger_every=1` the run stops one step later."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step = step
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            trainer.set_trigger("preempted", "the test")


class RowLogger(Logger):
    """Keeps its rows in a list that outlives it, as a file would; goes on below the row of its state."""

    def __init__(self, rows: list[dict[str, float]]) -> None:
        super().__init__()
        self.rows = rows

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append({"step": step, **metrics})

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rows": len(self.rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        del self.rows[state_dict["rows"] :]


@dataclass
class Result:
    """What a run left behind."""

    module: Net
    trainer: Trainer
    stopped: bool
    rows: list[dict[str, float]]
    seen: list[list[int]]


class StepLosses(Callback):
    """The mean loss over all ranks of every optimizer step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._window: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        local = trainer._run.source.share.mine
        sums = torch.tensor([float(outputs["loss"]) * local, float(local)], dtype=torch.float64)
        self._window.append(module.all_gather(sums).reshape(-1, 2).sum(0))
        if trainer.position.batch == trainer.position.window_batch:
            total, count = torch.stack(self._window).sum(0).tolist()
            self.values.append(total / count)
            self._window = []


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def own_callbacks(case: Case) -> list[Callback]:
    """Every built-in one with a state or with rows in the log, and a user's."""
    if not case.callbacks:
        return [Scaled()] if case.scaler else []
    stopping = EarlyStopping("val_loss_epoch", min_delta=10.0, patience=2)  # nothing is ever better than the first
    return [Average(), stopping, LearningRateMonitor(), LearningRateMonitor("epoch"), Timer("00:01:00:00")]


def make_trainer(case: Case, root: Path, rows: list[dict[str, float]], *callbacks: Callback) -> Trainer:
    if case.monitor:
        saver = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    elif case.every_n_train_steps:
        keep, background = -1 if case.background else 1, case.background
        saver = ModelCheckpoint(every_n_train_steps=case.every_n_train_steps, save_top_k=keep, background=background)
    else:
        saver = ModelCheckpoint()
    by_epoch = [GradientAccumulationScheduler(case.accumulate)] if isinstance(case.accumulate, dict) else []
    return Trainer(
        accelerator="cpu",
        devices="auto",
        logger=RowLogger(rows),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        max_epochs=case.epochs,
        accumulate_grad_batches=None if case.global_batch_size or by_epoch else case.accumulate,
        global_batch_size=case.global_batch_size,
        gradient_clip_val=0.5,
        precision=case.precision,
        val_check_interval=case.validate,
        check_val_every_n_epoch=None if case.across_epochs else 1,
        log_every_n_steps=case.log_every,
        seed_samples=case.seed_samples,
        streams="as_is",  # each rank has an order of its own
        trigger_every=1,
        callbacks=[*callbacks, *own_callbacks(case), *by_epoch, saver],
    )


def run_once(
    case: Case, root: Path, number: int = 0, rows: list[dict[str, float]] | None = None, *callbacks: Callback
) -> Result:
    """Train as a new process would: other seeds, new objects, `ckpt_path="auto"`."""
    rows = [] if rows is None else rows
    seed(100 + number)
    module = Net(case.schedule, optimizer=case.optimizer, scheduler=case.scheduler, torchmetrics=case.torchmetrics)
    if case.compiled == "module":
        module.compile(backend="eager")
    elif case.compiled == "part":
        module.net = torch.compile(module.net, backend="eager")
    trainer = make_trainer(case, root, rows, *callbacks)
    val = DataLoader(Plain(VALIDATION_SAMPLES), batch_size=3)
    stopped = False
    try:
        trainer.fit(module, train_loader(case), val, ckpt_path="auto")
    except Preempted:
        stopped = True
    return Result(module, trainer, stopped, rows, module.seen)


def run_with_stops(case: Case, root: Path, stops: Sequence[int]) -> Result:
    """Stop at each of the steps, then run to the end; `seen` is what all of them saw."""
    seen: list[list[int]] = []
    rows: list[dict[str, float]] = []
    for number, step in enumerate(stops):
        part = run_once(case, root, number, rows, StopAt(step))
        assert part.stopped, f"{case} did not stop at {step}"
        seen += part.seen
    last = run_once(case, root, len(stops), rows)
    assert not last.stopped
    return replace(last, seen=seen + last.seen)


def assert_same(got: Result, expected: Result, what: str) -> None:
    """The whole state, bit for bit."""
    _same(got.module.state_dict(), expected.module.state_dict(), f"{what}: weights")
    optimizers = [result.trainer.optimizers[0].state_dict() for result in (got, expected)]
    _same(*optimizers, f"{what}: optimizer")
    schedulers = [result.trainer.lr_scheduler_configs[0].scheduler.state_dict() for result in (got, expected)]
    _same(*schedulers, f"{what}: scheduler")
    metrics = [dict(result.trainer.callback_metrics) for result in (got, expected)]
    _same(*metrics, f"{what}: metrics")
    _same(got.rows, expected.rows, f"{what}: log")
    callbacks = [[c.state_dict() for c in result.trainer.callbacks if _keeps(c)] for result in (got, expected)]
    _same(*callbacks, f"{what}: callbacks")
    savers = [result.trainer.checkpoint_callback for result in (got, expected)]
    _same(*[saver and saver.best_model_score for saver in savers], f"{what}: best score")
    scalers = [result.trainer.strategy.precision.state_dict() for result in (got, expected)]
    _same(*scalers, f"{what}: scaler")
    _same(got.trainer.position.state_dict(), expected.trainer.position.state_dict(), f"{what}: position")
    assert got.seen == expected.seen, f"{what}: samples {got.seen} != {expected.seen}"


def _keeps(callback: Callback) -> bool:
    """Whether a callback's state is the same after a resume: not times, nor the paths of checkpoints."""
    return not isinstance(callback, Timer | ModelCheckpoint)


def _same(a: Any, b: Any, where: str) -> None:
    if isinstance(a, dict):
        assert set(a) == set(b), f"{where}: {set(a) ^ set(b)}"
        for key in a:
            _same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            _same(one, other, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{where}: {a} != {b}"
    else:
        assert a == b, f"{where}: {a!r} != {b!r}"


def check(case: Case, root: Path, stops: Sequence[Sequence[int]]) -> None:
    """Every way of stopping gives what a run without a stop gives."""
    expected = run_once(case, root / "whole")
    expected_rng = rng_state()
    for steps in stops:
        name = "-".join(map(str, steps))
        what = f"{case}, stopped at {name}"
        got = run_with_stops(case, root / name, steps)
        assert_same(got, expected, what)
        _same(rng_state(), expected_rng, f"{what}: rng")
