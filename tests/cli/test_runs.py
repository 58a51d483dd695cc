"""`instep runs ...` in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import CheckpointStore
from instep.cli.main import main
from tests.cli.checkpoint.conftest import writes
from tests.runs.test_folder import write_run


def said(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> Any:
    assert main(["runs", *map(str, words)]) == code
    shown = capsys.readouterr()
    return json.loads(shown.out) if "--json" in words else shown.out if code == 0 else shown.err


@pytest.fixture
def two(tmp_path: Path) -> Path:
    first = write_run(tmp_path / "version_0")
    write_run(tmp_path / "version_1", status="failed", error="ValueError: bad\nmore")
    (first / "hparams.yaml").write_text("lr: 0.5\nmodel:\n  width: 8\n")
    (first / "metrics.csv").write_text("step,loss\n1,0.5\n2,1e-5\n3,nan\n")
    return tmp_path


def test_ls_shows_each_run_with_its_state_and_chosen_columns(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = said(capsys, "ls", two, "-c", "lr,loss", "--sort", "loss").splitlines()
    assert header.split()[1:] == [
        "state",
        "lr",
        "loss",
        "least",
        "loss",
        "at",
        "step",
        "step",
        "epoch",
        "updated",
        "why",
    ]
    assert [row.partition(" s ago")[0].split()[:-1] for row in rows] == [
        ["lr=0.1", "failed", "0.1", "0.25", "0.25*", "2", "12", "2"],
        ["lr=0.5", "finished", "0.5", "nan", "12", "2"],
    ]
    assert [row.partition("ago  ")[2] for row in rows] == ["ValueError: bad", "loss is nan, first at step 3"]
    [only] = said(capsys, "ls", two, "--state", "failed", "--json")["runs"]
    assert (only["name"], only["cause"], only["exit_code"]) == ("lr=0.1", "ValueError: bad\nmore", 0)
    assert (only["path"], only["hparams"]["model/width"], only["metrics"]["loss"]["least"]) == ("version_1", 8, 0.25)
    assert "no run is ever 'bad'; the states are starting" in said(capsys, "ls", two, "--state", "bad", code=1)
    assert "there are lr, model/width, loss; and name" in said(capsys, "ls", two, "-c", "los", code=1)
    (two / "empty").mkdir()
    assert "there is no run in" in said(capsys, "ls", two / "empty", code=1)


def test_compare_shows_what_differs(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", two / "version_0", two / "version_1")
    answer = said(capsys, *words, "--json")
    order = [run["name"] for run in answer["runs"]]
    lr = dict(zip(order, answer["hparams"]["lr"], strict=True))
    assert lr == {"lr=0.5": 0.5, "lr=0.1": 0.1}
    assert answer["same"] == {"model/width": 8}
    loss = dict(zip(order, answer["metrics"]["loss"], strict=True))
    assert loss["lr=0.5"] == {
        "last": "nan", "last_step": 3.0, "least": 1e-5, "least_step": 2.0, "greatest": 0.5, "greatest_step": 1.0,
        "count": 3, "not_finite": 1, "first_bad": 3.0,
    }  # fmt: skip
    shown = said(capsys, *words)
    assert "nan (1e-05 .. 0.5, first nan at step 3)" in shown
    assert "1 hyperparameter the same in all" in shown


def test_show_of_a_crash_says_what_it_did_the_cause_by_rank_and_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["python", "train.py", "--name", "a b", "--key", "***"]
    cause = "rank 1 (host n2, step 40) ended with SIGKILL"
    end = {"status": "failed", "error": cause, "command": command, "cwd": "/work", "resumes": True}
    run = write_run(tmp_path / "version_0", **end, summary={"time_s": {"data": 3.0, "forward": 1.0}})
    progress = {"stage": "train", "phase": "save", "epoch": 2, "max_epochs": 5, "batch": 7, "batches": 9, "time": 1e9}
    (run / "progress.json").write_text(json.dumps({**progress, "global_step": 41, "max_steps": -1}))
    (run / "failures").mkdir()
    for rank, more in ((0, {"remote": True, "how": "exception"}), (1, {"cause": True, "how": "SIGKILL"})):
        report = {"rank": rank, "host": f"n{rank}", "step": 40, "traceback": f"  in f\nE{rank}\x1b[2J", **more}
        (run / f"failures/rank-{rank}.json").write_text(json.dumps(report))
    (run / "train.log").write_text("last words\n")
    shown = said(capsys, "show", tmp_path)
    assert shown.startswith(f"{tmp_path.name}: failed\n{run}\nwhy: {cause}\n")
    assert "was doing: train, phase save, epoch 3 of 5, batch 7 of 9, step 41, " in shown
    assert [line.split()[0] for line in shown.splitlines() if " n0 " in line or " n1 " in line] == ["1", "0"]
    assert "traceback of rank 1\n    in f\n  E1\\x1b[2J\n" in shown
    assert "time: 4 s: data 75%, forward 25%" in shown
    assert "end of train.log\nlast words\n" in shown
    ends = "it goes on with\n  cd /work\n  python train.py --name 'a b' --key '***'\n"
    assert shown.endswith(f"{ends}  (*** stands for secrets, which are not kept)\n")
    answer = said(capsys, "show", tmp_path, "--json")
    assert answer["go_on"] == "python train.py --name 'a b' --key '***'"
    assert (answer["metrics"]["loss"]["last"], answer["step"], answer["hparams"]["lr"]) == (0.25, 41, 0.1)


def test_why_of_a_loader_that_failed_is_the_workers_own_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = "Traceback (most recent call last):"
    trace = (
        f'{header}\n  File "train.py", line 9, in __getitem__\n    raise ValueError\nValueError: bad sample\nsee it\n'
    )
    cause = f"ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal {trace}"
    run = write_run(tmp_path / "version_0", status="failed", error=cause)
    assert f"why: {cause.strip()}\n" in said(capsys, "show", run), "it stands nowhere else"
    (run / "failures").mkdir()
    failure = {"rank": 0, "message": cause, "traceback": f"{header}\n  in main\n{cause}"}
    (run / "failures/rank-0.json").write_text(json.dumps(failure))
    shown = said(capsys, "show", run)
    assert "why: ValueError: bad sample\n" in shown
    assert shown.count("raise ValueError") == 1
    assert "Caught" not in said(capsys, "ls", tmp_path)


def test_show_verifies_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "version_0")
    path = CheckpointStore(run / "checkpoints").save(10, writes(1.0, 10))
    assert "  newest, complete" in said(capsys, "show", run)
    assert "  newest, verified" in said(capsys, "show", run, "--verify")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert "broken: model.safetensors differs from what was written" in said(capsys, "show", run, "--verify")
