"""SwanLab offline, read by SwanLab's own reader; no test leaves this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instep.errors import InstepError
from instep.loggers import SwanLabLogger
from tests.loggers.trackers.kinds import log_every_kind
from tests.loggers.trackers.trackers import TRACKERS

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]  # of SwanLab's packages
pytest.importorskip("swanlab", reason="swanlab is not installed: make test-trackers")


def records(folder: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = folder.rglob("swanlog/run-*/*.swanlab")
    reader = DataStoreReader()
    reader.open(path)
    found = [Record.FromString(data) for data in reader]
    reader.close()
    return found


def test_every_kind_comes_back_from_the_folder(tmp_path: Path) -> None:
    logger = SwanLabLogger("digits", experiment_name="first", mode="offline", tags=["a"])
    logger.delivery.start(tmp_path)
    assert log_every_kind(logger, tmp_path) == {"histogram", "table"}
    at_checkpoint = TRACKERS["swanlab"].read(tmp_path)  # the process may be killed from here on
    assert at_checkpoint["loss"] == [(step, step / 3) for step in range(3)]
    assert logger.experiment.id == logger.version
    logger.finalize("failed")

    found = records(tmp_path)
    start = next(one.start for one in found if one.HasField("start"))
    assert (start.project, start.name, start.id, list(start.tags)) == ("digits", "first", logger.version, ["a"])
    media = {one.media.key: len(one.media.value.items) for one in found if one.HasField("media")}
    assert media == {"said": 1, "seen": 2, "heard": 1, "moved": 1}
    assert any(one.save.name.endswith("weights.bin") for one in found if one.HasField("save"))
    assert next(one.finish.error for one in found if one.HasField("finish")) == "failed"
    config = next(tmp_path.rglob("files/config.yaml")).read_text()
    assert "lr" in config
    assert "width" in config


def test_no_key_and_nobody_to_ask_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    with pytest.raises(InstepError, match='mode="offline"'):
        SwanLabLogger("digits", mode="online").delivery.start(tmp_path / "run")
