"""Run folders are found without their points, and each says how it is."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from instep.errors import UsageError
from instep.runs import Run, find_runs
from instep.runs.folder import tail


def write_run(folder: Path, **status: Any) -> Path:
    folder.mkdir(parents=True)
    content = {"status": "done", "exit_code": 0, "global_step": 12, "epoch": 1, "run_id": "r", "error": None}
    (folder / "status.json").write_text(json.dumps({**content, **status}))
    (folder / "hparams.yaml").write_text("lr: 0.1\nmodel:\n  width: 8\n")
    (folder / "metrics.csv").write_text("step,loss\n1,0.5\n2,0.25\n")
    return folder


def one(folder: Path) -> Run:
    (run,) = find_runs(folder)
    return run


def test_runs_below_a_folder_are_found_the_newest_first_and_links_are_none(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a/instep_runs/version_0")
    second = write_run(tmp_path / "a/instep_runs/version_1", status="failed", error="rank 1: ValueError: x\x1b[31m")
    (first / "inner").mkdir()
    (first / "inner/metrics.csv").write_text("step\n")  # of that run
    (tmp_path / "a/link").symlink_to(first)
    csv = tmp_path / "lightning_logs/version_0"
    csv.mkdir(parents=True)
    (csv / "metrics.csv").write_text("epoch,step,loss\n0,1,2.0\n")
    for number, folder in enumerate((csv, first, second)):
        for path in folder.iterdir():
            os.utime(path, (1e9 + number, 1e9 + number))
    runs = find_runs(tmp_path)
    assert [run.name for run in runs] == [
        "a/instep_runs/version_1",
        "a/instep_runs/version_0",
        "lightning_logs/version_0",
    ]
    assert [run.status.state for run in runs] == ["failed", "finished", "unknown"]
    assert runs[0].status.cause == "rank 1: ValueError: x\\x1b[31m"
    assert runs[0].status.by_rank == {1: "ValueError: x\\x1b[31m"}
    assert runs[1].hparams == {"lr": 0.1, "model": {"width": 8}}
    assert one(first).name == "version_0"
    with pytest.raises(UsageError, match="is no folder"):
        find_runs(tmp_path / "missing")


def test_only_what_changed_is_read_again(tmp_path: Path) -> None:
    write_run(tmp_path / "version_0")
    changing = write_run(tmp_path / "version_1")
    before = find_runs(tmp_path)
    with (changing / "metrics.csv").open("a") as file:
        file.write("3,0.125\n")
    after = find_runs(tmp_path, before)
    kept = [run.name for run in after if any(run is old for old in before)]
    assert kept == ["version_0"]


def test_a_run_whose_process_is_gone_is_dead(tmp_path: Path) -> None:
    mine = {"status": "running", "host": socket.gethostname()}
    assert one(write_run(tmp_path / "a", **mine, pid=os.getpid())).status.state == "running"
    gone = one(write_run(tmp_path / "b", **mine, pid=2**22 + 1)).status
    assert (gone.state, gone.cause.partition(":")[0]) == (
        "dead",
        f"its main process (host {socket.gethostname()}, pid {2**22 + 1}) is gone",
    )


def test_the_failures_of_ranks_come_cause_first_and_progress_is_newer_than_the_status(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", status="failed", error="RuntimeError: Connection closed by peer")
    (folder / "failures").mkdir()
    for rank, more in ((0, {"remote": True}), (3, {"cause": True}), (1, {})):
        report = {"rank": rank, "how": "exception", "message": f"E{rank}", **more}
        (folder / f"failures/rank-{rank}.json").write_text(json.dumps(report))
    (folder / "failures/rank-9.json").write_text("{")
    (folder / "progress.json").write_text('{"global_step": 40, "phase": "train"}')
    status = one(folder).status
    assert list(status.by_rank.items()) == [(3, "exception: E3"), (1, "exception: E1"), (0, "exception: E0")]
    assert (status.step, status.progress["phase"]) == (40, "train")


def test_damage_and_links_become_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "hparams.yaml").write_text("a: !!python/object:os.system {}\n")
    (folder / "status.json").write_text("[1]")
    (tmp_path / "secret").write_text("status: 1")
    run = one(folder)
    assert (run.status.state, run.status.cause) == ("unknown", "status.json cannot be read")
    assert run.hparams == {}
    assert "the tag" in run.problems[0]
    (folder / "hparams.yaml").unlink()
    (folder / "hparams.yaml").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "out.log")
    assert one(folder).problems == ["hparams.yaml is a link"]
    assert tail(folder / "out.log").endswith("where a regular file is expected")


def test_the_tail_of_a_log_is_its_last_lines_with_bars_drawn_over(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("".join(f"line {i}\n" for i in range(99)) + "  1%\r 50%\r100%\n")
    assert tail(tmp_path / "x.log", 2) == "line 98\n100%\n"


def test_the_log_that_was_written_last_is_first_and_empty_ones_are_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for name, text, time_s in (("old.log", "x", 1e9), ("new.log", "x", 2e9), ("empty.log", "", 3e9)):
        (folder / name).write_text(text)
        os.utime(folder / name, (time_s, time_s))
    assert [path.name for path in one(folder).logs()] == ["new.log", "old.log", "empty.log"]
