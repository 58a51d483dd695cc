from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import ClassVar

import pytest

from instep.cli.main import main
from instep.errors import SettingError, UsageError
from instep.loggers import NAMES, CSVLogger
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
        self.delivery.version = self.delivery.version or "run-7"

    def _log_metrics(self, metrics, step):
        if not Server.up:
            raise ConnectionError("down")
        if "bad" in metrics:
            raise ValueError("no such name")
        with Path(self._place).open("a") as file:
            file.write(json.dumps([self.delivery.version, step, metrics]) + "\n")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose tracker was down for its second half."""
    monkeypatch.setattr("instep.loggers.sender._PERIOD_S", 0.01)
    monkeypatch.setattr("instep.loggers.sync._PAUSE_S", 0.01)
    monkeypatch.setitem(NAMES, "server", Server)
    logger = Server(place=str(tmp_path / "store"), flush_timeout_s=0.1)
    monkeypatch.setattr(Server, "up", True)
    logger.delivery.start(tmp_path / "run")
    for step in range(8):
        if step == 4:
            logger.delivery.sender.flush(10)
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


def rows_of(folder):
    with (folder / "metrics.csv").open() as file:
        return [float(row["x"]) for row in csv.DictReader(file)]


def run_with_rows_that_wait(run):
    """Write four rows of a run, and have five more wait for a disk that is full."""

    def refuse(*args):
        raise OSError(28, "No space left on device")

    logger = CSVLogger(flush_timeout_s=0.1)
    logger.delivery.start(run)
    for step in range(4):
        logger.log_metrics({"x": step / 4}, step)
    logger.save()
    with pytest.MonkeyPatch.context() as patch, warned() as said:
        for name in ("_log_metrics", "_log_rows"):
            patch.setattr(CSVLogger, name, refuse, raising=False)
        for step in range(4, 9):
            logger.log_metrics({"x": step / 4}, step)
        logger.finalize()
    assert "5 records" in said[-1]


def test_a_run_from_another_machine_asks_and_shows_where_it_goes(tmp_path, monkeypatch, capsys):
    run_with_rows_that_wait(tmp_path / "run")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another machine"))
    assert main(["runs", "sync", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert "was not written by you" in said
    assert f"CSVLogger() into {tmp_path / 'run'}" in said
    assert "--yes" in said
    assert len(rows_of(tmp_path / "run")) == 4
    assert main(["runs", "sync", str(tmp_path / "run"), "--yes"]) == 0
    assert rows_of(tmp_path / "run") == [step / 4 for step in range(9)]


def test_a_line_that_was_added_to_ones_own_run_asks(tmp_path):
    run_with_rows_that_wait(tmp_path / "run")
    with (tmp_path / "run/loggers/CSVLogger.jsonl").open("a") as file:
        file.write(json.dumps(["_log_metrics", [{"dict": {"x": 9.0}}, 9], 9, 1.0]) + "\n")
    with pytest.raises(UsageError, match="not written by you"):
        list(sync(tmp_path / "run"))


@pytest.mark.parametrize(
    "change", [{"folder": "/tmp"}, {"version": "x"}, {"arguments": {"name": "x"}}, {"id": "0" * 32}]
)
def test_a_note_that_was_changed_asks(tmp_path, change):
    run_with_rows_that_wait(tmp_path / "run")
    note = tmp_path / "run/loggers/CSVLogger.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), **change}))
    with pytest.raises(UsageError, match="not written by you"):
        list(sync(tmp_path / "run"))


class Named(Server):
    """A tracker that is sent keys of the environment."""

    _SYNC = ("place", "url")
    seen: ClassVar[list] = []

    def __init__(self, place: str = "", url: str | None = None, **options) -> None:
        super().__init__(place, **options)
        self._url = url

    def _start(self):
        self.delivery.version = "run-7"
        Named.seen.append((self._url, os.environ.get("NAMED_KEY"), os.environ["HOME"]))

    def _log_metrics(self, metrics, step):
        pass


def test_a_logger_of_ones_own_gets_no_keys_for_a_host_of_a_strangers_note(tmp_path, monkeypatch):
    monkeypatch.setitem(NAMES, "named", Named)
    monkeypatch.setenv("NAMED_KEY", "s3cret")
    place = tmp_path / "run/loggers"
    place.mkdir(parents=True)
    note = {"logger": f"{Named.__module__}:{Named.__qualname__}", "arguments": {"url": "evil.example:80"}}
    (place / "Named.json").write_text(json.dumps(note))
    (place / "Named.jsonl").write_text(json.dumps(["_log_metrics", [{"dict": {"x": 9.0}}, 9], 9, 1.0]) + "\n")
    asked = []
    monkeypatch.setattr(Named, "seen", [])
    home = os.environ["HOME"]
    assert [one.left for one in sync(tmp_path / "run", ask=asked.append)] == [0]
    [(url, key, seen_home)] = Named.seen
    assert (url, key) == ("evil.example:80", None)
    assert seen_home != home
    assert (os.environ["HOME"], os.environ["NAMED_KEY"]) == (home, "s3cret")
    assert "evil.example:80" in asked[0]


@pytest.mark.parametrize("place", ["/etc/passwd", "../../outside", "~/x"])
def test_a_logger_of_ones_own_gets_no_place_outside_from_a_strangers_note(tmp_path, monkeypatch, run, place):
    note = run / "loggers" / "Server.json"
    said = json.loads(note.read_text())
    note.write_text(json.dumps({**said, "arguments": {"place": place}}))
    with pytest.raises(SettingError, match="leads out"):
        list(sync(run, ask=print))
