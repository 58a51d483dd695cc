"""The trackers: how a run gets its logger, and how its values are read back with the tracker's own reader."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
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
        once: whether it keeps one value of a metric at a step, where the run logs the same one twice.
        env: variables of the processes that write, besides those of the tests; `{root}` is the folder.
    """

    module: str
    logger: Callable[[Path], Any]
    read: Callable[[Path], Series]
    keeps: type[np.floating[Any]] = np.float64
    ordered: bool = True
    once: bool = False
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


def _aim(root: Path) -> Any:
    from instep.loggers import AimLogger

    return AimLogger(root / "repo", "digits", system_tracking_interval=None, capture_terminal_logs=False)


def _read_aim(root: Path) -> Series:
    import aim
    from aim.sdk.index_manager import RepoIndexManager

    repo = aim.Repo.from_path(str(root / "repo"))
    (key,) = repo.list_all_runs()
    RepoIndexManager.get_index_manager(repo).index(key)  # as `aim up` does
    found: Series = {}
    for metric in aim.Run(key, repo=repo, read_only=True).metrics():
        steps, (values, *_) = metric.data.items_list()
        subset = metric.context.to_dict().get("subset")
        found[f"{subset}_{metric.name}" if subset else metric.name] = list(zip(steps, values, strict=True))
    return found


def _swanlab(root: Path) -> Any:
    from instep.loggers import SwanLabLogger

    return SwanLabLogger(project="digits", mode="offline")


def _read_swanlab(root: Path) -> Series:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: Series = {}
    for path in sorted(root.rglob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        for scalar in (Record.FromString(data).scalar for data in reader):
            if scalar.key:
                found.setdefault(scalar.key, []).append((scalar.step, scalar.value.number))
        reader.close()
    return found


def _dvclive(root: Path) -> Any:
    from instep.loggers import DVCLiveLogger

    os.chdir(root)  # in a git repository DVCLive makes a DVC repository
    return DVCLiveLogger(save_dvc_exp=False)


def _read_dvclive(root: Path) -> Series:
    from types import SimpleNamespace

    from dvclive.utils import parse_metrics

    (folder,) = root.rglob("dvclive")
    tables, _ = parse_metrics(SimpleNamespace(plots_dir=folder / "plots", metrics_file=folder / "metrics.json"))
    return {
        Path(path).stem: [(int(row["step"]), float(row[Path(path).stem])) for row in rows]
        for path, rows in tables.items()
    }


def _comet(root: Path) -> Any:
    from instep.loggers import CometLogger

    return CometLogger(project="digits", online=False, log_code=False)


def _read_comet(root: Path) -> Series:
    from zipfile import ZipFile

    found: Series = {}
    archives = [ZipFile(path) for path in root.rglob("comet/*.zip")]
    assert len({json.loads(archive.read("experiment.json"))["offline_id"] for archive in archives}) == 1
    for archive in archives:
        for message in map(json.loads, archive.read("messages.json").splitlines()):
            if message["type"] == "metric_msg":
                metric = message["payload"]["metric"]
                found.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
    return found


def _clearml(root: Path) -> Any:
    from instep.loggers import ClearMLLogger

    logger = ClearMLLogger("digits", offline=True)
    logger._start_timeout_s = 60.0  # on a busy machine the import alone takes longer than the 15 s of a run
    return logger


def _read_clearml(root: Path) -> Series:
    found: Series = {}
    for path in root.rglob("clearml/*/offline/offline-*/metrics.jsonl"):
        for event in (event for line in path.read_text().splitlines() for event in json.loads(line)):
            if event["type"] == "training_stats_scalar":
                title, series = event["metric"], event["variant"]
                name = title if title == series else f"{series}_{title}"
                found.setdefault(name, []).append((event["iter"], event["value"]))
    return found


def _mlflow(root: Path) -> Any:
    from instep.loggers import MLFlowLogger

    return MLFlowLogger("digits", tracking_uri=f"sqlite:///{root}/mlflow.db")


def _read_mlflow(root: Path) -> Series:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params in ({"width": "16"}, {})  # some runs log none
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(metric.step, metric.value) for metric in metrics] for name, metrics in history.items()}


def _trackio(root: Path) -> Any:
    from instep.loggers import TrackioLogger

    return TrackioLogger("digits", save_dir=root / "trackio", auto_log_cpu=False)


def _read_trackio(root: Path) -> Series:
    command = [sys.executable, "-m", "trackio.cli", "query", "project", "--project", "digits", "--json", "--sql"]
    asked = "select run_name, step, metrics from metrics order by id"
    done = subprocess.run(
        [*command, asked],
        env={**os.environ, "TRACKIO_DIR": str(root / "trackio"), "HOME": str(root / "home")},
        check=True,
        capture_output=True,
        text=True,
    )
    rows = json.loads(done.stdout)["rows"]
    assert len({row["run_name"] for row in rows}) == 1
    found: Series = {}
    for row in rows:
        for name, value in json.loads(row["metrics"]).items():
            found.setdefault(name, []).append((row["step"], value))
    return found


TRACKERS: dict[str, Tracker] = {
    "csv": Tracker("instep", _csv, _read_csv),
    "tensorboard": Tracker("tensorboard", _tensorboard, _read_tensorboard, keeps=np.float32),
    "wandb": Tracker("wandb", _wandb, _read_wandb),
    "aim": Tracker("aim", _aim, _read_aim, ordered=False, once=True),
    "swanlab": Tracker("swanlab", _swanlab, _read_swanlab, once=True),
    "dvclive": Tracker("dvclive", _dvclive, _read_dvclive, env={"DVC_NO_ANALYTICS": "true"}),
    "comet_ml": Tracker("comet_ml", _comet, _read_comet, ordered=False),
    "clearml": Tracker("clearml", _clearml, _read_clearml, ordered=False),
    "mlflow": Tracker("mlflow", _mlflow, _read_mlflow, ordered=False),
    "trackio": Tracker("trackio", _trackio, _read_trackio),
}
