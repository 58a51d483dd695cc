"""The benchmarks run from end to end, in miniature; their numbers mean nothing here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.spawn import run_command

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.benchmarks


def run(name: str, out: Path, *args: str) -> dict[str, Any]:
    """Run a benchmark and return its JSON; where it writes several files, by their names."""
    done = run_command([sys.executable, str(BENCHMARKS / name), "--out", str(out), *args])
    assert done.stdout, f"{done.returncode}\n{done.stderr}"
    results = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
    return results if len(results) > 1 else next(iter(results.values()))


BROKEN_SOAK = """
import runpy, sys
from tests.checkpoint import killing
killing.lost = lambda root, board: "step 7 was saved, but 6 is the newest"
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="the soak finds a job's processes in /proc")
def test_a_soak_that_loses_something_says_so_and_fails(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}  # the folders of what was lost are kept
    program = f"import sys; sys.argv = {[str(BENCHMARKS / 'soak.py'), '--kills', '2', '--out', str(tmp_path / 'out')]}"
    done = run_command([sys.executable, "-c", program + BROKEN_SOAK], cwd=BENCHMARKS.parent, env=env)
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert (result["kills"], result["recovered"], result["unrecoverable"]) == (2, 0, 2)
    first, second = (loss["run"] for loss in result["losses"])  # a run that ends before its kill is none of them
    assert first < second < result["runs"]
    for loss in result["losses"]:
        assert loss["kill"]["target"] in ("job", "rank", "agent")
        assert "step 7 was saved, but 6 is the newest (seed 1, " in loss["text"]
    assert all(row[2] == 0 for rows in result["tables"].values() for row in rows)


@pytest.mark.slow
def test_the_benchmark_of_overhead_writes_its_numbers(tmp_path: Path) -> None:
    args = ("--steps", "200", "--repetitions", "1", "--contenders", "handwritten", "instep", "--cases", "bare")
    result = run("overhead.py", tmp_path, *args)
    assert [(row["contender"], row["case"]) for row in result["results"]] == [
        ("handwritten", "bare"),
        ("instep", "bare"),
    ]
    assert all(row["handwritten_wall_us"]["median"] > 0 for row in result["results"])
    assert {"processor", "versions", "python"} <= result["machine"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(("contender", "data"), [("instep", "ready"), ("accelerator", "loader")])
def test_the_benchmark_of_overhead_with_everything_on_writes_its_numbers(
    contender: str, data: str, tmp_path: Path
) -> None:
    args = ("--steps", "200", "--repetitions", "1", "--contenders", contender, "--cases", "everything")
    result = run("overhead.py", tmp_path, *args, "--data", data)
    assert result["data"] == data
    [row] = result["results"]
    assert row["handwritten_wall_us"]["median"] > 0
    assert row["terminal_bytes"] > 500  # the bar was drawn
    assert row["save_ms"]["median"] > 0


@pytest.mark.slow
def test_the_benchmark_of_memory_stays_below_its_limit(tmp_path: Path) -> None:
    result = run("memory.py", tmp_path, "--quick", "--repetitions", "1", "--contenders", "handwritten", "instep")
    growth = {(row["contender"], row["case"]): row["growth_mb"]["median"] for row in result["results"]}
    assert growth["instep", "everything"] < result["limit_mb"]


@pytest.mark.slow
def test_the_benchmark_of_import_time_writes_its_numbers(tmp_path: Path) -> None:
    result = run("import_time.py", tmp_path, "--rounds", "1", "--contenders", "instep")
    assert result["results"]["instep"]["in_one_process_s"]["median"] > 0
    assert result["import_instep_loads_torch"] is False
    assert min(result["help_s"][name]["median"] for name in ("instep", "torchrun")) > 0


@pytest.mark.slow
def test_the_benchmark_of_checkpoints_compares_ways_to_save(tmp_path: Path) -> None:
    [result] = run("checkpoint.py", tmp_path, "--quick")["results"]
    assert {"instep", "instep background", "torch.save", "torch.save + fsync", "dcp", "dcp async"} <= set(
        result["seconds"]
    )
    assert result["host_buffer_bytes"] >= result["saved_bytes"] > 30e6
    assert all(times["safe_s"]["median"] >= times["blocked_s"]["min"] for times in safe_ones(result))
    assert set(result["bars"]) == {"share of torch.save", "over copy_", "first over clone", "checksum share"}


def safe_ones(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [times for times in result["seconds"].values() if "safe_s" in times]


@pytest.mark.slow
@pytest.mark.dist
def test_the_benchmark_of_strategies_writes_its_numbers(tmp_path: Path) -> None:
    result = run("strategies.py", tmp_path, "--quick", "--strategies", "ddp", "--steps", "3")
    [step], [memory] = result["strategies_step_quick"]["results"], result["strategies_memory_quick"]["results"]
    assert step["strategy"] == memory["strategy"] == "ddp"
    assert step["step_ms"]["median"] > 0
    assert step["step_ratio"]["median"] > 0
    assert memory["instep_mb"]["median"] > 100


@pytest.mark.slow
@pytest.mark.dist
def test_the_benchmark_of_the_first_step_adds_up(tmp_path: Path) -> None:
    result = run("first_step.py", tmp_path, "--quick", "--ways", "instep launch, instep")
    assert list(result["results"]) == ["torchrun, by hand", "instep launch, instep"]
    for way in result["results"].values():
        parts = sum(way[phase]["median"] for phase in ("command", "imports", "set up"))
        assert 0 < parts == pytest.approx(way["first step"]["median"], abs=0.02)
        assert way["all"]["median"] > way["first step"]["median"]


@pytest.mark.slow
@pytest.mark.dist
def test_scaling_and_that_a_step_has_one_collective_at_any_number_of_ranks(tmp_path: Path) -> None:
    result = run("studies/scaling.py", tmp_path, "--quick")
    few, many = (result["counted"][world] for world in ("2", "64"))
    assert few["parts"] == many["parts"]
    once = {"allgather": 2}  # ranks agree once which values they average
    assert many["parts"]["40 steps"] == {"allreduce": 39, "gradients": 40, **once}
    assert 39 * 16 < many["sent"]["40 steps"] < 39 * 16 + 200
    assert result["timed_us"]["2"]["triggers.sync"] > 0


GROWING: dict[str, Any] = {
    "cpu_ms": lambda done: 1.0 + done / 100,  # what each unit costs
    "resident_mb": lambda done: 300.0 + done / 5,
    "descriptors": lambda done: 8 + done // 20,
    "threads": lambda done: 4 + done // 30,
    "log_bytes": lambda done: done * done * 10,  # each row is longer than the one before
    "other_bytes": lambda done: 1e5 + 2e3 * done,
    "checkpoint_bytes": lambda done: 2e4 + 50 * done,
    "status_bytes": lambda done: 700 + 5 * done,
    "other_files": lambda done: 20 + done // 4,
}


def points_of_a_leg(monkeypatch: pytest.MonkeyPatch, **grows: Any) -> tuple[Any, list[dict[str, float]]]:
    """The long proof, and the points of a leg of 120 units where nothing grows but these figures and the logs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from studies import longhaul

    flat = {name: grow(0) for name, grow in GROWING.items()}
    points = [
        {"done": done, **flat, "by_hand_ms": 20.0, "log_bytes": 50 * done, **{n: f(done) for n, f in grows.items()}}
        for done in range(10, 121, 10)
    ]
    return longhaul, points


@pytest.mark.parametrize("name", GROWING)
def test_the_long_proof_names_a_figure_that_grows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longhaul, points = points_of_a_leg(monkeypatch, **{name: GROWING[name]})
    [text] = longhaul.judge(points, ("log_bytes",))
    assert text.startswith(f"{name} ")


def test_the_long_proof_allows_rows_new_runs_a_slower_machine_and_one_disturbed_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longhaul, points = points_of_a_leg(monkeypatch)
    assert longhaul.judge(points, ("log_bytes",)) == []
    points[10] = {**points[10], **{name: 10 * points[10][name] for name in ("cpu_ms", "resident_mb", "descriptors")}}
    assert longhaul.judge(points, ("log_bytes",)) == []
    slower = {"cpu_ms": GROWING["cpu_ms"], "by_hand_ms": lambda done: 20.0 * GROWING["cpu_ms"](done)}
    assert longhaul.judge(points_of_a_leg(monkeypatch, **slower)[1], ("log_bytes",)) == []
    runs = points_of_a_leg(monkeypatch, other_bytes=lambda done: 3e4 * done, other_files=lambda done: 9 * done)[1]
    assert longhaul.judge(runs, longhaul.NEW_RUNS) == []
    assert longhaul.judge(runs[:11], longhaul.NEW_RUNS) == ["there are 11 points, where 12 are expected"]


@pytest.mark.skipif(sys.platform != "linux", reason="the long proof reads /proc")
def test_a_leg_of_the_long_proof_that_raises_or_takes_too_long_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from studies import longhaul

    legs = {"nonsense": longhaul.Leg(1, "unit", 100.0), "rows": longhaul.Leg(10**9, "row", 0.1)}
    monkeypatch.setattr(longhaul, "LEGS", legs)
    found = longhaul.run_all(list(legs), quick=False)
    assert found["nonsense"]["failed"][0].startswith("it ended with status 1: ")
    assert "KeyError: 'nonsense'" in found["nonsense"]["failed"][0]
    assert found["rows"]["failed"] == ["it took longer than 0.1 s"]


def test_the_page_says_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import page

    results = page.read()
    assert page.text(results) == (BENCHMARKS.parent / "docs" / "reference" / "benchmarks.md").read_text()
    less = {name: result for name, result in results.items() if name != "launch"}
    assert "## The first step" not in page.text(less)


def test_the_suite_goes_on_when_one_fails_and_names_it(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import suite

    monkeypatch.setattr(suite, "BENCHMARKS", {"memory": (("--nonsense",), 1), "checkpoint": (("--help",), 1)})
    monkeypatch.setattr(sys, "argv", ["suite.py", "--quick", "--only", "memory", "checkpoint"])
    assert suite.main() == 1
    said = capfd.readouterr()
    assert "== checkpoint: status 0" in said.out
    assert "failed, or missed a bar: memory\n" in said.err
