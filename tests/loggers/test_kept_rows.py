"""What a logger has taken is in its files or kept, once: slow, full and killed writers, resumed or sent later."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from instep import loggers
from instep.errors import UsageError
from instep.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from instep.loggers.sync import sync
from tests.helpers.spawn import HANG_S
from tests.loggers.test_delivery import warned

KINDS = ("CSVLogger", "JSONLinesLogger", "TensorBoardLogger")

# Each row takes a millisecond; which part of each logger that is was so before and after rows were kept.
SLOW = """
import csv, json, os, signal, sys, time, warnings
from pathlib import Path
from tensorboard.summary.writer import record_writer
from instep.loggers import backlog, sender
import instep.loggers as loggers

def slowed(function):
    def slow(*args, **options):
        time.sleep(0.001)
        return function(*args, **options)
    return slow

class Writer:
    def __init__(self, *args, **options):
        self.inner = make(*args, **options)
        self.writerow = slowed(self.inner.writerow)
    def writerows(self, rows):
        for row in rows:
            self.writerow(row)

make, csv.writer = csv.writer, Writer
record_writer.RecordWriter.write = slowed(record_writer.RecordWriter.write)
import instep.loggers.json_lines as lines
class json_slow:
    dumps, loads = slowed(json.dumps), json.loads
lines.json = json_slow
sender._PERIOD_S = 0.001
warnings.simplefilter("always")
kind, run = getattr(loggers, sys.argv[1]), sys.argv[2]
"""


def child(code: str, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANG_S, check=False)


def found(folder: Path) -> list[tuple[int, float]]:
    """Step and value of each `x` in the files of any logger, in their order."""
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open(newline="") as file:
            return [(int(float(row["step"])), float(row["x"])) for row in csv.DictReader(file) if row.get("x")]
    if (folder / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["x"]) for row in rows if "x" in row]
    points: list[tuple[int, float]] = []
    for file in sorted(folder.glob("events.*"), key=lambda file: file.stat().st_mtime_ns):
        for event in LegacyEventFileLoader(str(file)).Load():
            if event.HasField("session_log"):
                points = [point for point in points if point[0] < event.step]
            points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "x"]
    return points


def waiting(run: Path) -> int:
    files = list((run / "loggers").glob("*.jsonl"))
    return sum(line.startswith(b"[") for file in files for line in file.read_bytes().splitlines())


def send(run: Path) -> list[int]:
    return [one.left for one in sync(run)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_writers_rows_are_kept_the_number_said_is_theirs_and_a_later_sync_adds_them_once(kind, tmp_path):
    code = f"""{SLOW}
logger = kind(flush_timeout_s=0.15)
logger.delivery.start(run)
for i in range(1500):
    logger.log_metrics({{"x": float(i)}}, 1)  # at one step: only their order tells them apart
logger.finalize()
"""
    done = child(code, kind, tmp_path)
    assert done.returncode == 0, done.stderr
    [said] = re.findall(r"did not take (\d+) records", done.stderr)
    assert (int(said), int(said) + len(found(tmp_path))) == (waiting(tmp_path), 1500)
    assert int(said) > 0
    assert send(tmp_path) == [0]
    assert found(tmp_path) == [(1, float(i)) for i in range(1500)]
    assert not (tmp_path / "loggers").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_killed_behind_a_checkpoint_that_its_writer_had_not_reached_goes_on_without_a_gap(kind, tmp_path):
    code = f"""{SLOW}
from instep.loggers import delivery
delivery._CHECKPOINT_WAIT_S = 0.05
logger = kind()
logger.delivery.start(run)
for i in range(900):
    logger.log_metrics({{"x": float(i)}}, i // 3)
Path(run, "state").write_text(json.dumps({{**logger.state_dict(), "global_step": 299}}))
for i in range(900, 960):
    logger.log_metrics({{"x": float(i)}}, i // 3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert child(code, kind, tmp_path).returncode < 0
    assert waiting(tmp_path)
    resumed: Logger = getattr(loggers, kind)()
    resumed.load_state_dict(json.loads((tmp_path / "state").read_text()))
    resumed.delivery.start(tmp_path)
    for i in range(900, 1200):
        resumed.log_metrics({"x": float(i)}, i // 3)
    resumed.finalize()
    assert Counter(found(tmp_path)) == Counter((i // 3, float(i)) for i in range(1200))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_run_had_on_the_disk_is_sent_without_resuming_it(kind, tmp_path):
    code = f"""{SLOW}
backlog.QUEUE_RECORDS = 100
logger = kind()
logger.delivery.start(run)
for i in range(1000):
    logger.log_metrics({{"x": float(i)}}, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert child(code, kind, tmp_path).returncode < 0
    assert send(tmp_path) == [0]
    rows = [value for _, value in found(tmp_path)]
    assert rows == [float(i) for i in range(len(rows))]
    assert len(rows) >= 900


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_in_the_middle_of_a_row_costs_none_and_repeats_none(kind, tmp_path):
    code = f"""{SLOW}
import resource
logger = kind()
logger.delivery.start(run)
for i in range(60):
    logger.log_metrics({{"x": float(i), "y": 0.0}}, i)
    if i == 20:
        logger.save()
        size = max(os.path.getsize(file) for file in Path(run).glob("*[!l]*") if file.name[0] in "em")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 101, resource.RLIM_INFINITY))
    if i == 40:
        logger.save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logger.finalize()
"""
    done = child(code, kind, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stderr
    assert found(tmp_path) == [(i, float(i)) for i in range(60)]


class Tracker(Logger):
    """Writes into a folder that a relative path names."""

    _LOCAL, _SYNC, up = False, ("place",), False

    def __init__(self, place: str, **options) -> None:
        super().__init__(**options)
        self._place = place

    def _log_metrics(self, metrics, step):
        if not Tracker.up:
            raise ConnectionError("down")
        Path(self._place).mkdir(exist_ok=True)
        with Path(self._place, "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


SAVED: dict[str, tuple[Callable[[], Logger], str]] = {
    "csv": (lambda: CSVLogger("logs", "a"), "logs/a/version_0"),
    "its own folder": (lambda: CSVLogger("other", version="b"), "other/b"),
    "json lines": (lambda: JSONLinesLogger("."), "version_0"),
    "sub_dir": (lambda: TensorBoardLogger("logs", sub_dir="tb"), "logs/version_0/tb"),
    "a tracker": (lambda: Tracker("place"), "place"),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_waits_goes_where_the_logger_wrote_from_any_folder(name, tmp_path, monkeypatch):
    make, place = SAVED[name]
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir(), elsewhere.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setitem(loggers.NAMES, "tracker", Tracker)
    monkeypatch.setattr(Tracker, "up", False)
    logger = make()
    logger._flush_timeout_s = 0.05
    run = Path("run" if logger.runs_dir is None or "other" in place else place.removesuffix("/tb"))
    logger.delivery.start(run)
    logger.log_metrics({"x": 0.0}, 0)
    logger.save()
    monkeypatch.setattr(type(logger), "_log_rows", _down, raising=False)
    with warned() as said:
        for i in range(1, 5):
            logger.log_metrics({"x": float(i)}, i)
        logger.finalize()
    monkeypatch.undo()
    monkeypatch.setitem(loggers.NAMES, "tracker", Tracker)
    monkeypatch.setattr(Tracker, "up", True)
    monkeypatch.chdir(elsewhere)
    assert said[-1].endswith(f"instep runs sync {here / run}")
    assert send(here / run) == [0]
    assert found(here / place) == [(i, float(i)) for i in range(5)]
    assert not list(elsewhere.iterdir())
    assert Path.cwd() == elsewhere


def _down(self, rows):
    raise ConnectionError("down")


def test_the_rows_of_a_run_folder_that_was_moved_go_to_its_new_place(tmp_path, monkeypatch):
    logger = CSVLogger(tmp_path / "logs", flush_timeout_s=0.05)
    logger.delivery.start(tmp_path / "logs/version_0")
    with monkeypatch.context() as patch:
        patch.setattr(CSVLogger, "_log_rows", _down)
        with warned():
            logger.log_metrics({"x": 1.0}, 1)
            logger.finalize()
    (tmp_path / "logs/version_0").rename(tmp_path / "kept")
    assert send(tmp_path / "kept") == [0]
    assert found(tmp_path / "kept") == [(1, 1.0)]
    assert not (tmp_path / "logs/version_0").exists()


def test_two_loggers_of_one_folder_share_its_table(tmp_path):
    first, second = CSVLogger(), CSVLogger()
    first.delivery.start(tmp_path), second.delivery.start(tmp_path)
    for step in range(4):
        first.log_metrics({"a": float(step), **({"late": 1.0} if step == 3 else {})}, step)
        second.log_metrics({"b": -float(step)}, step)
        first.save(), second.save()
    first.finalize(), second.finalize()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    late = [{"step": 3, "a": 3.0, "late": 1.0}]
    assert [row for row in rows if "a" in row] == [{"step": step, "a": step} for step in range(3)] + late
    assert [row for row in rows if "b" in row] == [{"step": step, "b": -step} for step in range(4)]


@pytest.mark.parametrize("name", ["metrics.csv", "metrics.jsonl"])
def test_a_link_in_a_run_folder_leads_no_row_out_of_it(name, tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    run.mkdir()
    kind = CSVLogger if name == "metrics.csv" else JSONLinesLogger
    outside.write_text("mine\n")
    (run / name).symlink_to(outside)
    with pytest.raises(UsageError, match="is a link to"):
        kind().delivery.start(run)
    (run / name).unlink()
    os.link(outside, run / name)
    logger = kind()
    logger.delivery.start(run)
    logger.log_metrics({"x": 1.0}, 1)
    logger.finalize()
    assert outside.read_text() == "mine\n"


@pytest.mark.parametrize("kind", KINDS)
def test_one_name_that_utf8_does_not_have_costs_no_other_row(kind, tmp_path):
    logger: Logger = getattr(loggers, kind)()
    logger.delivery.start(tmp_path)
    with warned() as said:
        for i in range(5):
            logger.log_metrics({"x": float(i), **({os.fsdecode(b"acc/\xff"): 1.0} if i == 2 else {})}, i)
        logger.finalize()
    assert [text for text in said if "no text of UTF-8" in text]
    assert found(tmp_path) == [(i, float(i)) for i in range(5)]
    assert not (tmp_path / "loggers").exists()


@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger])
def test_a_row_of_the_checkpoints_step_that_is_logged_again_is_whole(kind, tmp_path):
    logger = kind()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"x": 1.0, "epoch": 0.0}, 3)
    state = {**logger.state_dict(), "global_step": 4}
    logger.log_metrics({"x": 2.0, "epoch": 0.0}, 4)
    logger.finalize()  # then it is killed in the validation
    resumed = kind()
    resumed.load_state_dict(state)
    resumed.delivery.start(tmp_path)
    resumed.log_metrics({"val": 5.0, "epoch": 0.0}, 4)
    resumed.finalize()
    last = (tmp_path / ("metrics.csv" if kind is CSVLogger else "metrics.jsonl")).read_text().splitlines()[-1]
    assert last == "4,,0.0,5.0" or json.loads(last)["epoch"] == 0.0


def test_a_subclass_that_changes_metrics_is_asked_for_each(tmp_path):
    class Doubled(CSVLogger):
        def _log_metrics(self, metrics, step):
            super()._log_metrics({name: 2 * value for name, value in metrics.items()}, step)

    logger = Doubled()
    logger.delivery.start(tmp_path)
    logger.log_metrics({"x": 1.0}, 1)
    logger.finalize()
    assert found(tmp_path) == [(1, 2.0)]


@pytest.mark.parametrize("timeout_s", [1e-9, 1e12, float("inf")])
def test_any_time_limit_above_zero_loses_nothing(timeout_s, tmp_path):
    logger = CSVLogger(flush_timeout_s=timeout_s)
    logger.delivery.start(tmp_path)
    with warned():
        logger.log_metrics({"x": 1.0}, 1)
        logger.finalize()
        logger.finalize()
    if waiting(tmp_path):
        send(tmp_path)
    assert found(tmp_path) == [(1, 1.0)]
