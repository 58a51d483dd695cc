"""Trackio with its database on this machine, in a process of its own: it has one folder in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.trackers

KINDS = """
import sys
import numpy as np
from pathlib import Path
from instep.errors import SettingError
from instep.loggers import TrackioLogger

logger = TrackioLogger("digits", "first", save_dir="trackio", auto_log_cpu=False)
logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}})
logger.delivery.start("run")
logger.log_metrics({"loss": 1 / 3, "step": 7.0, "bad": float("nan")}, step=5)
logger.log_image("seen", [np.zeros((4, 4)), np.ones((3, 4, 4))], step=5)
logger.log_text("said", "Once", 5)
logger.log_audio("heard", np.zeros(100), step=5, sample_rate=8000)
logger.log_video("moved", np.zeros((2, 3, 4, 4)), step=5)
logger.log_histogram("weights", np.ones(3), 5)
logger.log_table("table", ["a", "b"], [[1, "x"], [2, None]], step=5)
logger.log_artifact(sys.executable, "python", "program")
logger.log_checkpoint("run", ["best"])
logger.save()
assert logger.experiment.name == logger.version == "first"
logger.finalize()
again = TrackioLogger("digits", version="first", save_dir="trackio", auto_log_cpu=False)
again.delivery.start("run")
again.log_metrics({"loss": 0.25}, step=6)
again.finalize()

import trackio
from trackio.sqlite_storage import SQLiteStorage

(run,) = trackio.Api().runs("digits")
assert {"lr": 0.1, "net": {"width": 3}}.items() <= run.config.items(), run.config
rows = SQLiteStorage.get_logs("digits", "first")
found = {name: value for row in rows for name, value in row.items() if name not in ("step", "timestamp")}
assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(5, 1 / 3), (6, 0.25)]
assert found["__step"] == 7.0
kinds = {"seen/0": "image", "seen/1": "image", "heard": "audio", "moved": "video", "weights": "histogram"}
kinds |= {"said": "markdown", "table": "table"}
assert {name: found[name]["_type"].split(".")[1] for name in kinds} == kinds, found
artifacts = SQLiteStorage.get_artifacts("digits")
assert {one["name"] for one in artifacts} == {"python", "checkpoint"}, artifacts
try:
    TrackioLogger("digits", save_dir="other").delivery.start("run")
    raise SystemExit("two folders in one process")
except SettingError as error:
    assert "set TRACKIO_DIR before" in str(error)
"""


def test_everything_comes_back_and_a_run_goes_on(tmp_path: Path) -> None:
    if find_spec("trackio") is None:  # an import here would settle the one folder of this process for later tests
        pytest.skip("trackio is not installed: make test-trackers")
    done = subprocess.run(
        [sys.executable, "-c", KINDS],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
