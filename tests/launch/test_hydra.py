"""Programs within a job of Hydra: they start their ranks, stop, go on and fail as they do without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from instep.launch.hydra import _insert
from tests.helpers.spawn import Finished, run_command
from tests.helpers.warm import warm_python

HERE = Path(__file__)
PROGRAM = str(HERE.with_name("hydra_job.py"))
BY_TIME = r"hydra.run.dir (in a sweep hydra.sweep.dir)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train.py", "train.py A B"),
        ("train.py lr=1 +x=2 ~y", "train.py lr=1 +x=2 ~y A B"),
        ("train.py --multirun lr=1,2", "train.py --multirun lr=1,2 A B"),
        ("train.py lr=1,2 -m", "train.py lr=1,2 A B -m"),
        ("-m package.train -cn other lr=1", "-m package.train -cn other lr=1 A B"),
        ("train.py --config-name=other", "train.py --config-name=other A B"),
    ],
)
def test_overrides_stand_behind_the_users(given: str, expected: str) -> None:
    assert " ".join(_insert(tuple(given.split()), ["A", "B"])) == expected


def run(folder: Path, *overrides: str, start: tuple[str, ...] = (), code: int = 0, **env: str) -> Finished:
    folder.mkdir(exist_ok=True)
    argv = [warm_python(), *start, PROGRAM, f"said={folder}/said.jsonl", *overrides]
    done = run_command(argv, env={"PYTHONPATH": str(HERE.parents[2]), **env}, cwd=folder)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def said(folder: Path) -> list[dict[str, Any]]:
    """What each rank of each job said; forgotten then."""
    path = folder / "said.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(lines, key=lambda line: (line["output"], line["rank"]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder, "hydra.run.dir=out")
    (one,) = said(folder)
    assert (one["cwd"], one["output"]) == (str(folder), str(folder / "out"))
    assert one["saved"] == [0.1, "nothing"], "hyperparameters: the configuration"
    return one


@pytest.mark.hydra
def test_ranks_join_the_job_and_its_folder(plain: dict[str, Any], tmp_path: Path) -> None:
    """In a folder named by the time, which is the working directory too."""
    done = run(tmp_path, "devices=2", "hydra.job.chdir=True")
    first, second = said(tmp_path)
    (folder,) = (tmp_path / "outputs").glob("*/*")
    for rank, one in enumerate((first, second)):
        assert (one["rank"], one["cwd"], one["output"]) == (rank, str(folder), str(folder))
        assert (one["log_dir"], one["step"]) == (str(folder / "instep_runs" / "version_0"), plain["step"])
    assert first["weights"] == second["weights"]
    assert "run.dir" not in (folder / ".hydra" / "overrides.yaml").read_text(), "as the user's command has them"
    assert done.stdout.count(BY_TIME) == 1, "the next start would not find the run, which is said"
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


@pytest.mark.hydra
@pytest.mark.parametrize("devices", [1, 2])
def test_a_stopped_run_is_gone_on_with_by_the_same_command(plain: dict[str, Any], devices: int, tmp_path: Path) -> None:
    command = (f"devices={devices}", "hydra.run.dir='out/it, (1)'", "hydra.job.chdir=True")
    stopped = run(tmp_path, *command, "do=interrupt", code=75)
    assert "Stopping (SIGINT)" in stopped.stderr
    assert BY_TIME not in stopped.stdout
    done = run(tmp_path, *command)
    assert "Resuming from" in done.stdout
    for one in said(tmp_path):
        assert one["log_dir"] == str(tmp_path / "out" / "it, (1)" / "instep_runs" / "version_0")
        assert one["step"] == plain["step"]
        assert devices > 1 or one["weights"] == plain["weights"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["it, (1)"]


@pytest.mark.hydra
@pytest.mark.parametrize("devices", [1, 2])
def test_the_jobs_of_a_sweep_run_once_each(devices: int, tmp_path: Path) -> None:
    run(tmp_path, f"devices={devices}", "lr=0.1,0.2", "hydra.job.chdir=True", "-m")
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    jobs = said(tmp_path)
    assert [(one["output"], one["rank"]) for one in jobs] == [
        (str(sweep / str(job)), rank) for job in range(2) for rank in range(devices)
    ]
    assert [one["log_dir"] for one in jobs] == [f"{one['output']}/instep_runs/version_0" for one in jobs]
    assert len({one["weights"] for one in jobs}) == 2


@pytest.mark.hydra
def test_a_failure_under_hydra_shows_the_users_lines_alone(tmp_path: Path) -> None:
    alone = run(tmp_path, "do=fail", code=1)
    assert alone.stderr.rstrip().endswith("Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.")
    assert "hydra/core/utils.py" not in alone.stderr
    full = run(tmp_path, "do=fail", code=1, HYDRA_FULL_ERROR="1")
    assert "hydra/core/utils.py" in full.stderr
    ranks = run(tmp_path, "do=fail", "devices=2", code=1)
    assert re.search(r"instep: rank 1 .* failed with exit code 1:\nTraceback", ranks.stderr)
    assert ranks.stderr.splitlines()[-2].endswith("ValueError: on purpose")  # a note on the place follows
    assert said(tmp_path) == []


@pytest.mark.hydra
def test_a_failure_in_a_sweep(tmp_path: Path) -> None:
    """One process goes on with the next job, as Hydra does; ranks end, since one that failed alone meets nobody."""
    run(tmp_path, "do=fail,nothing", "root=${hydra:runtime.output_dir}", "--multirun", code=1)
    (one,) = said(tmp_path)
    assert one["output"].endswith("/1")
    ranks = run(tmp_path, "do=nothing,fail,nothing", "devices=2", "root=runs/${do}", "--multirun", code=1)
    assert ranks.stderr.splitlines()[-2].endswith("ValueError: on purpose")  # a note on the place follows
    assert [one["rank"] for one in said(tmp_path)] == [0, 1]
    late = run(tmp_path, "devices=1,2", "root=late/${devices}", "-m", code=1)
    assert "job 1 of this sweep asks for several devices" in late.stderr


@pytest.mark.hydra
def test_ranks_of_a_launcher(plain: dict[str, Any], tmp_path: Path) -> None:
    launch = ("-m", "instep.cli.main", "launch", "--devices", "2")
    run(tmp_path, "devices=2", "hydra.run.dir=out", "hydra.job.chdir=True", start=launch)
    first, second = said(tmp_path)
    assert {one["log_dir"] for one in (first, second)} == {str(tmp_path / "out" / "instep_runs" / "version_0")}
    assert first["weights"] == second["weights"]
