"""DVCLive's folder, and a DVC experiment in a git repository."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from instep.loggers import DVCLiveLogger
from tests.loggers.trackers.kinds import log_every_kind
from tests.loggers.trackers.trackers import TRACKERS

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]  # of DVC's packages
pytest.importorskip("dvclive", reason="dvclive is not installed: make test-trackers")


def test_every_kind_comes_back_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = DVCLiveLogger(report="html", save_dvc_exp=False)
    logger.delivery.start(tmp_path)
    assert log_every_kind(logger, tmp_path) == {"text", "audio", "video", "table"}
    logger.finalize()
    folder = tmp_path / "dvclive"
    assert TRACKERS["dvclive"].read(tmp_path)["loss"] == [(step, step / 3) for step in range(3)]
    assert json.loads((folder / "metrics.json").read_text())["step"] == 2
    assert yaml.safe_load((folder / "params.yaml").read_text())["net"] == {"width": 3}
    assert len(list(folder.glob("plots/images/seen/*.png"))) == 2
    assert (folder / "artifacts" / "net" / "weights.bin").read_bytes() == b"weights"
    assert "metrics" in yaml.safe_load((folder / "dvc.yaml").read_text())
    assert (folder / "report.html").stat().st_size > 1000


def test_a_half_row_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = DVCLiveLogger(save_dvc_exp=False)
    logger.delivery.start(tmp_path)
    logger.log_metrics({"loss": 0.25}, step=1)
    state = logger.state_dict()
    logger.log_metrics({"loss": 0.5}, step=2)
    logger.finalize("failed")
    table = tmp_path / "dvclive" / "plots" / "metrics" / "loss.tsv"
    table.write_bytes(table.read_bytes()[:-3])
    resumed = DVCLiveLogger(save_dvc_exp=False)
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.log_metrics({"loss": 0.5}, step=2)
    resumed.finalize()
    assert TRACKERS["dvclive"].read(tmp_path)["loss"] == [(1, 0.25), (2, 0.5)]


def test_the_run_is_a_dvc_experiment_where_there_is_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    me = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], [*me, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], check=True)
    for name, value in {"AUTHOR": "a", "COMMITTER": "a"}.items():
        monkeypatch.setenv(f"GIT_{name}_NAME", value)
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b.c")
    logger = DVCLiveLogger("first-run", dir="dvclive")
    logger.delivery.start(tmp_path / "run")
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize()
    done = subprocess.run(["git", "for-each-ref", "refs/exps"], capture_output=True, text=True, check=True)
    assert "first-run" in done.stdout
