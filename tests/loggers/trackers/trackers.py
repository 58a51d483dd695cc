"""The trackers: how a run gets its logger, and how its values are read back with the tracker's own reader."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Series = dict[str, list[tuple[int, float]]]
"""By a metric's name its steps and values, in the order in which the tracker gives them."""


@dataclass(frozen=True)
class Tracker:
    """A tracker under test.

    Args:
        module: what has to be installed.
        logger: makes the logger of a run below this folder.
        read: every value of that run by the tracker's own reader. What several processes wrote is the union: one
            that was written twice comes twice.
        keeps: the type that the tracker stores.
        ordered: whether the reader gives the values in the order of their steps.
        env: variables of the processes that write, besides those of the tests; `{root}` is the folder.
    """

    module: str
    logger: Callable[[Path], Any]
    read: Callable[[Path], Series]
    keeps: type[np.floating[Any]] = np.float64
    ordered: bool = True
    env: dict[str, str] = field(default_factory=dict)

    def environment(self, root: Path) -> dict[str, str]:
        """The variables for a run below this folder: no home, no key, no way to a server."""
        nowhere = {
            "HOME": str(root / "home"),
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "GIT_PYTHON_REFRESH": "quiet",
        }
        return {name: value.format(root=root) for name, value in {**nowhere, **self.env}.items()}

    def kept(self, value: float) -> float:
        """What the tracker stores of a value."""
        return float(self.keeps(value))


def _csv(root: Path) -> Any:
    from instep.loggers import CSVLogger

    return CSVLogger()


def _read_csv(root: Path) -> Series:
    found: Series = {}
    for path in sorted(root.rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                for name, cell in row.items():
                    if cell:
                        found.setdefault(name, []).append((step, float(cell)))
    return found


def _tensorboard(root: Path) -> Any:
    from instep.loggers import TensorBoardLogger

    return TensorBoardLogger()


def _read_tensorboard(root: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Series = {}
    for folder in sorted({path.parent for path in root.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    return found


def _wandb(root: Path) -> Any:
    from instep.loggers import WandbLogger

    return WandbLogger(offline=True, project="digits")


def _read_wandb(root: Path) -> Series:
    from tests.loggers.wandb_file import read

    runs = sorted((read(path) for path in root.rglob("offline-run-*/*.wandb")), key=lambda run: run["started"])
    assert len({run["id"] for run in runs}) == 1
    found: Series = {}
    for row in (row for run in runs for row in run["history"]):
        step = row.pop("trainer/global_step")
        for name, value in row.items():
            found.setdefault(name, []).append((step, float(value)))
    return found


TRACKERS: dict[str, Tracker] = {
    "csv": Tracker("instep", _csv, _read_csv),
    "tensorboard": Tracker("tensorboard", _tensorboard, _read_tensorboard, keeps=np.float32),
    "wandb": Tracker("wandb", _wandb, _read_wandb),
}
