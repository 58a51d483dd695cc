"""ClearML offline, from the files of its session; no test leaves this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from instep.loggers import ClearMLLogger
from tests.loggers.trackers.kinds import log_every_kind

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]  # of ClearML's packages
pytest.importorskip("clearml", reason="clearml is not installed: make test-trackers")


def test_every_kind_comes_back_from_the_session(tmp_path: Path) -> None:
    logger = ClearMLLogger("digits", "first", offline=True, tags=["a"])
    logger.delivery.start(tmp_path)
    assert log_every_kind(logger, tmp_path) == set()
    assert logger.experiment.name == "first"
    logger.finalize("failed")

    (folder,) = tmp_path.glob(f"clearml/{logger.version}/offline/offline-*/")
    task = json.loads((folder / "task.json").read_text())
    assert (task["project_name"], task["name"]) == ("digits", "first")
    assert {"lr", "net/width"} <= task["hyperparams"]["hparams"].keys()
    assert [artifact["key"] for artifact in task["execution"]["artifacts"]] == ["net"]
    events = [event for line in (folder / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
    scalars = [(one["metric"], one["variant"], one["iter"], one["value"]) for one in events if "value" in one]
    assert [one for one in scalars if one[:2] == ("loss", "loss")] == [("loss", "loss", i, i / 3) for i in range(3)]
    assert ("loss", "train", 0, 2.0) in scalars
    media = {(one["metric"], one["variant"]) for one in events if one["type"] == "training_debug_image"}
    assert media == {("seen", "black"), ("seen", "white"), ("heard", "0"), ("moved", "0")}
    assert {one["metric"] for one in events if one["type"] == "plot"} >= {"weights", "table"}
