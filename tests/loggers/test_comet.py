"""Comet offline, from its archives; no test leaves this machine."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

from instep.errors import InstepError
from instep.loggers import CometLogger
from tests.loggers.trackers.kinds import log_every_kind
from tests.loggers.trackers.trackers import TRACKERS

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]  # of Comet's packages
pytest.importorskip("comet_ml", reason="comet_ml is not installed: make test-trackers")


def test_every_kind_comes_back_from_the_archive(tmp_path: Path) -> None:
    logger = CometLogger(project="digits", workspace="me", online=False, name="first", tags=["a"], log_code=False)
    logger.delivery.start(tmp_path)
    assert log_every_kind(logger, tmp_path) == set()
    assert logger.experiment.get_key() == logger.version
    logger.finalize("failed")

    (path,) = tmp_path.glob("comet/*.zip")
    with ZipFile(path) as archive:
        about = json.loads(archive.read("experiment.json"))
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    assert (about["offline_id"], about["project_name"], about["workspace"]) == (logger.version, "digits", "me")
    kinds = {message["payload"].get("upload_type") for message in messages}
    assert kinds >= {"text-sample", "visualization", "audio", "video", "histogram3d", "model-element"}, kinds
    names = {str(message["payload"].get("additional_params", {}).get("fileName")) for message in messages}
    assert {"table-2.csv", "weights.bin", "heard.wav"} <= {Path(name).name for name in names}, names
    assert "black" in str(messages)
    assert "white" in str(messages)
    told = [message["payload"] for message in messages if message["type"] in ("parameter_msg", "log_other")]
    assert "net|width" in str(told)
    assert "'failed'" in str(told)


def test_no_key_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    with pytest.raises(InstepError, match="API key"):
        CometLogger(online=True).delivery.start(tmp_path / "run")


def test_a_process_killed_while_it_made_its_archive_is_in_one_archive(tmp_path: Path) -> None:
    first = CometLogger(online=False, log_code=False)
    first.delivery.start(tmp_path)
    first.log_metrics({"loss": 0.5}, step=1)
    state = first.state_dict()
    first.finalize("failed")
    (path,) = tmp_path.glob("comet/*.zip")
    with ZipFile(path) as archive:
        archive.extractall(tmp_path / "comet" / f"{first.version}-unfinished" / "tmp1")
    (tmp_path / "comet" / f"{first.version}-half.zip").write_bytes(path.read_bytes()[:100])
    resumed = CometLogger(online=False, log_code=False)
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.log_metrics({"loss": 0.25}, step=2)
    resumed.finalize()
    resumed.delivery.start(tmp_path)  # such as a test after fit
    resumed.log_metrics({"loss": 0.125}, step=3)
    resumed.finalize()
    assert len(list(tmp_path.glob("comet/*.zip"))) == 3
    assert sorted(TRACKERS["comet_ml"].read(tmp_path)["loss"]) == [(1, 0.5), (2, 0.25), (3, 0.125)]
