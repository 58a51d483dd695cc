"""Runs that are as long as users' are: nothing in them grows but what the user asked to keep."""

from __future__ import annotations

import csv
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instep import Callback, Trainer
from instep.callbacks import LearningRateMonitor, ModelCheckpoint
from instep.loggers import CSVLogger, TensorBoardLogger
from tests.trainer.toys import LoggingToy, Mean, samples


class Measuring(LoggingToy):
    """Logs step values, epoch values, and a metric object."""

    def __init__(self) -> None:
        super().__init__(lr=1e-4)
        self.mean = Mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        self.mean.update(batch[1])
        self.log("mean", self.mean)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1000)]


class Growth(Callback):
    """Measures what the process and the run folder hold, after some of the epochs.

    Args:
        epochs: after which it measures; the first time what is made once is there already.
    """

    def __init__(self, *epochs: int) -> None:
        self.epochs = epochs
        self.held: list[Counter[str]] = []
        self.spent_s: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch in self.epochs:
            for logger in trainer.loggers:
                logger.save()  # rows that wait are as many as came within the last moment
            gc.collect()
            objects = Counter(f"object {type(one).__name__}" for one in gc.get_objects())
            folder = Path(trainer.log_dir)
            files = Counter(f"file *{path.suffix}" for path in folder.rglob("*") if "checkpoints" not in path.parts)
            process = {"descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
            assert len(list((folder / "checkpoints").iterdir())) <= 6, "two best, the last, one on its way, the lease"
            self.held.append(objects + files + Counter(process))
            self.spent_s.append(time.process_time())

    def check(self) -> None:
        """Assert that nothing has grown from the first measurement to the last one, and no epoch takes longer."""
        first, last = self.held[0], self.held[-1]
        grown = {name: last[name] - first[name] for name in last if last[name] > first[name]}
        few = {name: by for name, by in grown.items() if name.startswith("object ")}
        assert {name: by for name, by in grown.items() if name not in few} == {}
        # What stays of each epoch would be 368 or more. Caches of abstract classes grow with other tests' classes.
        assert max(few.values(), default=0) < 300, few
        early, *_, late = (after - before for before, after in zip(self.spent_s, self.spent_s[1:], strict=False))
        assert late < 2 * early


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where the machine has one: some thousand files are written and deleted."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as path:
        yield Path(path)


def rows(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric in the run's table."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def run(folder: Path, growth: Growth, batches: int, saves: ModelCheckpoint, **settings: Any) -> Any:
    loaders = [DataLoader(samples(number), batch_size=2, shuffle=True) for number in (2 * batches, 4)]
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=[CSVLogger(folder), TensorBoardLogger(folder)],
        callbacks=[growth, saves, LearningRateMonitor()],
        enable_progress_bar=False,
        **settings,
    )
    trainer.fit(Measuring(), *loaders)
    growth.check()
    return trainer


@pytest.mark.campaign
def test_1200_epochs_with_loggers_checkpoints_and_validation(folder: Path) -> None:
    epochs, batches, growth = 1200, 2, Growth(200, 400, 1000, 1199)
    saves = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    trainer = run(folder, growth, batches, saves, max_epochs=epochs, log_every_n_steps=2)
    assert (trainer.current_epoch, trainer.global_step) == (epochs, epochs * batches)
    at_ends = range(batches, epochs * batches + 1, batches)
    assert [step for step, _ in rows(folder, "train_loss_step")] == list(range(2, epochs * batches + 1, 2))
    for name in ("train_loss_epoch", "val_loss", "mean"):
        assert [step for step, _ in rows(folder, name)] == list(at_ends)
    best = min(score for _, score in rows(folder, "val_loss"))
    assert float(saves.best_model_score) == best
    assert Path(saves.best_model_path).is_dir()
    assert Path(saves.last_model_path).is_dir()


@pytest.mark.campaign
def test_40000_steps_with_loggers_checkpoints_and_validation(folder: Path) -> None:
    steps, batches, growth = 40_000, 100, Growth(30, 60, 370, 398)
    saves = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    trainer = run(
        folder, growth, batches, saves, max_epochs=-1, max_steps=steps, log_every_n_steps=5, check_val_every_n_epoch=5
    )
    assert (trainer.current_epoch, trainer.global_step) == (steps // batches, steps)
    assert [step for step, _ in rows(folder, "train_loss_step")] == list(range(5, steps + 1, 5))
    assert [step for step, _ in rows(folder, "train_loss_epoch")] == list(range(batches, steps + 1, batches))
    assert [step for step, _ in rows(folder, "val_loss")] == list(range(5 * batches, steps + 1, 5 * batches))
