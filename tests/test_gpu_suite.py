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
import sys
sys.path.insert(0, "GPU")
import suite
suite.PARTS = {"trial": {"good": 30, "bad": 30, "absent": 30, "killed": 30, "endless": 1}}
if __name__ == "__main__":
    suite.PART_S = int(sys.argv.pop(1))
    raise SystemExit(suite.main())
"""


@pytest.mark.slow
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
    assert set(suite.PARTS["tests"]) == marked


def marked_gpu(path: Path) -> bool:
    return "pytest.mark.gpu" in path.read_text() and path.name != Path(__file__).name


@pytest.mark.slow
def test_what_has_no_answer_yet_runs_next_time(tmp_path: Path) -> None:
    count, mended = tmp_path / "count", tmp_path / "mended"
    text = TRIAL.replace("COUNT", str(count)).replace("MENDED", str(mended))
    (tmp_path / "trial.py").write_text(text)
    (tmp_path / "run.py").write_text(RUN.replace("GPU", str(GPU)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = ["trial", "--device", "cpu", "--out", str(tmp_path / "out")]

    def run(seconds: int, status: int) -> tuple[str, dict[str, Any]]:
        done = run_command([sys.executable, str(tmp_path / "run.py"), str(seconds), *words], env=env)
        assert done.returncode == status, done.stdout + done.stderr
        path = tmp_path / "out" / "trial.json"
        return done.stdout, json.loads(path.read_text())["rows"] if path.exists() else {}

    said, rows = run(1, 0)
    assert said.count("not run, since 1 s are over") == 5
    assert rows == {}
    said, rows = run(480, 1)
    assert rows["good"]["figures"] == {"figure": 1}
    assert rows["good"]["stand_ins"] == ["a clock"]
    assert rows["bad"]["failed"] == "it holds: not yet"
    assert rows["absent"]["left_out"] == "nothing is not installed"
    assert rows["killed"]["failed"].startswith("exit code 7")
    assert rows["endless"]["failed"].startswith("ended at its limit of 2 s")  # others left time
    assert "figure: not judged in a rehearsal" in said
    mended.touch()
    said, rows = run(480, 1)
    assert "trial good: kept, of " in said
    assert "failed" not in rows["bad"]
    assert count.read_text() == "x"


def test_the_readme_says_that_nothing_ran_on_a_gpu_until_something_has() -> None:
    results = list((ROOT / "benchmarks" / "results" / "gpu").glob("*/*.json"))
    assert ("not run on a GPU" in (ROOT / "README.md").read_text()) == (not results)
