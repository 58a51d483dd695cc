"""`make gpu` without a device: every row is rehearsed, and what is cut off goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.spawn import run_command

ROOT = Path(__file__).parents[1]
GPU = ROOT / "benchmarks" / "gpu"
TRIAL = """
import os, pathlib, time
from row import Answer

def good(place):
    answer = Answer({"figure": 1})
    answer.bar("figure", 1.0, 2.0, least=True)
    answer.check("it holds", True)
    place.stand_in("a clock")
    pathlib.Path("COUNT").open("a").write("x")
    return answer

def bad(place):
    answer = Answer()
    answer.check("it holds", pathlib.Path("MENDED").exists(), "not yet")
    return answer

def absent(place):
    place.leave_out("nothing is not installed")

def killed(place):
    os._exit(7)

def endless(place):
    time.sleep(1000)
"""
RUN = """
import pathlib, shutil, sys
sys.path.insert(0, "GPU")
import suite
suite.PARTS = {"trial": {"good": 30, "bad": 30, "absent": 30, "killed": 30, "endless": 1}}
if __name__ == "__main__":
    for number, seconds in enumerate((1, 480, 480, 1)):
        suite.PART_S = seconds
        print("status", suite.main(["trial", "--device", "cpu", "--out", "OUT"]))
        if number in (1, 2):
            shutil.copy("OUT/trial.json", f"OUT/{number}")
            pathlib.Path("MENDED").touch()
        if number == 2:
            pathlib.Path("OUT/trial.json").write_text("{")
"""


@pytest.mark.extras
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_every_row_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    import suite

    done = run_command([sys.executable, str(GPU / "suite.py"), "all", "--device", "cpu", "--out", str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    for part, rows in suite.PARTS.items():
        answers = json.loads((tmp_path / f"{part}.json").read_text())
        assert answers["rehearsal"]
        assert list(answers["rows"]) == list(rows)
    assert "**No figure here was measured on a GPU" in (tmp_path / "README.md").read_text()


def test_a_part_takes_eight_minutes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    import suite

    assert suite.PART_S == 480
    assert all(suite.START_S + sum(rows.values()) <= suite.PART_S for rows in suite.PARTS.values())
    marked = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if marked_gpu(path)}
    assert {file for row in suite.PARTS["tests"] for file in row.split()} == marked


def marked_gpu(path: Path) -> bool:
    return "pytest.mark.gpu" in path.read_text() and path.name != Path(__file__).name


@pytest.mark.extras
@pytest.mark.slow
def test_what_has_no_answer_yet_runs_next_time(tmp_path: Path) -> None:
    count, out = tmp_path / "count", tmp_path / "out"
    for name, text in {"trial.py": TRIAL, "run.py": RUN}.items():
        for word, path in {"GPU": GPU, "OUT": out, "MENDED": tmp_path / "mended", "COUNT": count}.items():
            text = text.replace(word, str(path))
        (tmp_path / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = run_command([sys.executable, str(tmp_path / "run.py")], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    cut, whole, again, damaged = done.stdout.split("status")[:4]
    assert "trial.json is damaged" in damaged
    assert (out / "trial.json.damaged").read_text() == "{"
    assert cut.count("not run, since 1 s are over") == 5
    assert done.stdout.count("status 1") == 2
    assert "figure: not judged in a rehearsal" in whole
    rows: dict[str, Any] = json.loads((out / "1").read_text())["rows"]
    assert rows["good"]["figures"] == {"figure": 1}
    assert rows["good"]["stand_ins"] == ["a clock"]
    assert rows["bad"]["failed"] == "it holds: not yet"
    assert rows["absent"]["left_out"] == "nothing is not installed"
    assert rows["killed"]["failed"].startswith("exit code 7")
    assert rows["endless"]["failed"].startswith("ended at its limit of 2 s")
    assert "trial good: kept, of " in again
    assert "failed" not in json.loads((out / "2").read_text())["rows"]["bad"]
    assert count.read_text() == "x"


def test_the_readme_says_that_nothing_ran_on_a_gpu_until_something_has() -> None:
    results = list((ROOT / "benchmarks" / "results" / "gpu").glob("*/*.json"))
    assert ("not run on a GPU" in (ROOT / "README.md").read_text()) == (not results)
