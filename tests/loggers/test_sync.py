from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from instep.cli.main import main
from instep.errors import SettingError
from instep.loggers import NAMES
from instep.loggers.sync import sync
from tests.loggers.test_delivery import Remote, warned
from tests.trainer.toys import LoggingToy, loader, quiet


class Server(Remote):
    """A tracker whose store is a file beside the runs."""

    up, away = False, False
    _SYNC = ("place",)

    def __init__(self, place: str, **options) -> None:
        super().__init__(**options)
        self._place = place

    def _start(self):
        if Server.away:
            raise ConnectionError("away")
        self._version = self._version or "run-7"

    def _log_metrics(self, metrics, step):
        if not Server.up:
            raise ConnectionError("down")
        if "bad" in metrics:
            raise ValueError("no such name")
        with Path(self._place).open("a") as file:
            file.write(json.dumps([self._version, step, metrics]) + "\n")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose tracker was down for its second half."""
    monkeypatch.setattr("instep.loggers.delivery._PERIOD_S", 0.01)
    monkeypatch.setattr("instep.loggers.sync._PAUSE_S", 0.01)
    monkeypatch.setitem(NAMES, "server", Server)
    logger = Server(place=str(tmp_path / "store"), flush_timeout_s=0.1)
    monkeypatch.setattr(Server, "up", True)
    logger.start(tmp_path / "run")
    for step in range(8):
        if step == 4:
            logger._delivery.flush(10)
            monkeypatch.setattr(Server, "up", False)
        logger.log_metrics({"loss": step / 3}, step)
    with warned() as said:
        logger.finalize()
    assert said[-1].endswith(f"instep runs sync {tmp_path / 'run'}")
    return tmp_path / "run"


def test_what_waits_is_sent_once_with_the_runs_own_id(run, monkeypatch, capsys):
    with warned():
        assert main(["runs", "sync", str(run)]) == 1
    assert "ConnectionError: down" in capsys.readouterr().out
    monkeypatch.setattr(Server, "away", True)
    with warned():
        assert main(["runs", "sync", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["loggers"] == [
        {"logger": "Server", "waited": 4, "left": 4, "reason": "ConnectionError: away"}
    ]
    monkeypatch.setattr(Server, "away", False)
    monkeypatch.setattr(Server, "up", True)
    assert main(["runs", "sync", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loggers"] == [
        {"logger": "Server", "waited": 4, "left": 0, "reason": ""}
    ]
    rows = [json.loads(line) for line in (run.parent / "store").read_text().splitlines()]
    assert rows == [["run-7", step, {"loss": step / 3}] for step in range(8)]
    assert main(["runs", "sync", str(run)]) == 0
    assert "nothing waits" in capsys.readouterr().out


def test_a_strangers_note_builds_nothing(run, monkeypatch):
    note = run / "loggers" / "Server.json"
    said = json.loads(note.read_text())
    for bad in ("os:system", "subprocess:Popen", "", None):
        note.write_text(json.dumps({**said, "logger": bad}))
        with pytest.raises(SettingError, match="not registered here"):
            list(sync(run))
    note.write_text(
        json.dumps({**said, "arguments": {**said["arguments"], "flush_timeout_s": 1e9, "log_model": "all"}})
    )
    monkeypatch.setattr(Server, "up", True)
    assert [one.left for one in sync(run)] == [0]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_another_users_file_sends_nothing(run, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(SettingError, match="belongs to another user"):
        list(sync(run))


def test_a_tracker_that_raises_at_every_call_ends_no_training(tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "server", Server)
    monkeypatch.setattr(Server, "up", False)
    logger = Server(place=str(tmp_path / "store"), flush_timeout_s=0.1)
    with warned() as said:
        trainer = quiet(max_epochs=2, log_every_n_steps=1, logger=logger, default_root_dir=tmp_path)
        trainer.fit(LoggingToy(), loader())
    assert trainer.state.finished
    run = Path(trainer.log_dir)
    assert said[-1].endswith(f"instep runs sync {run}")
    monkeypatch.setattr(Server, "up", True)
    [sent] = sync(run)
    assert (sent.waited > trainer.global_step, sent.left) == (True, 0)
    rows = [json.loads(line) for line in (tmp_path / "store").read_text().splitlines()]
    assert [step for _, step, metrics in rows if "train_loss_step" in metrics] == list(
        range(1, trainer.global_step + 1)
    )
