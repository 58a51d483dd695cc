"""A run that an older version began goes on in its folder, with its logs, each step once.

`python -m tests.loggers.test_old_runs` makes such runs in the working directory; those in `tests/data/old_runs` are of
commit 783a05b, without lease, progress file and the program's command.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Trainer, TrainModule
from instep.callbacks import Callback, ModelCheckpoint
from instep.loggers import NAMES, CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from instep.loggers.sync import sync

OLD = Path(__file__).parents[1] / "data" / "old_runs"
STEPS, KILLED_AT, SAVED_EVERY = 10, 7, 5


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.save_hyperparameters({"lr": 0.1})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tracker(Logger):
    _LOCAL, is_up = False, True
    rows: list[tuple[int, dict[str, float]]] = []

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if not Tracker.is_up:
            raise ConnectionError("down")
        Tracker.rows.append((step, metrics))


class Kill(Callback):
    """Kills the process once its loggers have written what came after the checkpoint."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == KILLED_AT:
            for logger in trainer.loggers:
                logger.save()
            os.kill(os.getpid(), signal.SIGKILL)


def train(*callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    loggers = [CSVLogger("logs", "a"), JSONLinesLogger("logs", "a"), TensorBoardLogger("logs", "a", sub_dir="board")]
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=[*loggers, CSVLogger("own", "beside")],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=SAVED_EVERY), *callbacks],
    )
    loader = torch.utils.data.DataLoader(torch.randn(4 * STEPS, 2), batch_size=4)
    trainer.fit(Net(), loader, ckpt_path="auto")
    return trainer


def steps(folder: Path) -> dict[str, list[int]]:
    """Steps of the loss in each file of a run, in their order."""
    found: dict[str, list[int]] = {}
    with (folder / "metrics.csv").open(newline="") as file:
        found["csv"] = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    if (folder / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found["jsonl"] = [row["step"] for row in rows if "loss" in row]
    if (folder / "board").exists():
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "board"), size_guidance={"scalars": 0})
        events.Reload()
        found["board"] = [event.step for event in events.Scalars("loss")]
    return found


@pytest.mark.filterwarnings("default:::tensorboard.*", "default::DeprecationWarning")
def test_a_killed_run_of_an_older_version_goes_on_in_its_folders_and_has_each_step_once(tmp_path, monkeypatch):
    for name in ("logs", "own"):
        shutil.copytree(OLD / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    run, beside = tmp_path / "logs/a/version_0", tmp_path / "own/beside/version_0"
    assert {tuple(of_file) for of_file in steps(run).values()} == {tuple(range(1, KILLED_AT))}
    trainer = train()
    assert (trainer.log_dir, trainer.global_step) == (str(run), STEPS)
    every = list(range(1, STEPS + 1))
    assert steps(run) == {"csv": every, "jsonl": every, "board": every}
    assert steps(beside) == {"csv": every}
    assert [path.name for path in (*run.parent.iterdir(), *beside.parent.iterdir())] == ["version_0"] * 2


def test_what_waits_of_an_older_versions_run_is_sent_once(tmp_path, monkeypatch):
    shutil.copytree(OLD / "waiting", tmp_path / "run")
    monkeypatch.setitem(NAMES, "old-tracker", Tracker)
    sent = [(one.logger, one.waited, one.left) for one in sync(tmp_path / "run", ask=lambda text: None)]
    assert sent == [("Tracker", 3, 0)]
    assert Tracker.rows == [(step, {"loss": step / 8}) for step in (4, 5, 6)]


def leave_waiting() -> None:
    """Send three records, and leave three that the tracker does not take."""
    logger: Any = Tracker(flush_timeout_s=1.0)
    (logger if hasattr(logger, "start") else logger.delivery).start("waiting")
    for step in range(1, 7):
        logger.log_metrics({"loss": step / 8}, step)
        if step == 3:
            logger.save()
            Tracker.is_up = False
    logger.finalize()


if __name__ == "__main__":
    from tests.loggers import test_old_runs  # the tracker's note names its module

    test_old_runs.leave_waiting()
    train(Kill())
