"""Ranks that hang are found, named and ended, under the agent and without one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instep.errors import EXIT_HUNG
from tests.helpers.jobs import JobServer
from tests.helpers.spawn import HANG_S, RanksFailed, run_ranks
from tests.launch.hung_job import train

pytestmark = pytest.mark.dist

TIMEOUT_S = 3.0  # no step takes so long, however busy the machine is


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    with JobServer("tests.launch.hung_job") as server:
        yield server


def _report(folder: Path) -> Path:
    (found,) = folder.glob("instep_runs/version_0/hang-*")
    return found


def _found_s(folder: Path) -> float:
    return (_report(folder) / "node-of-rank-0.txt").stat().st_mtime - float((folder / "hung").read_text())


def test_a_stopped_rank_is_named_and_the_job_starts_again(
    server: JobServer, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    log = tmp_path / "log"
    job = server.start(train, tmp_path, "stopped", TIMEOUT_S, nproc=2, log=log, max_restarts=1)
    try:
        assert job.wait(HANG_S) == 0, log.read_text()
    finally:
        job.kill("job")
    said = log.read_text()
    (stopped,) = re.findall(r"rank 1 \(pid (\d+)\) is stopped by a signal", said)
    assert f"rank 1 (pid {stopped}) did not end in its time and is killed" in said
    assert f"Stacks of all threads: {_report(tmp_path)}" in said
    assert "starting all ranks again (restart 1 of 1)" in said
    assert "_engine_run_backward" in said  # where rank 0 waits for its gradients
    waits = (_report(tmp_path) / "rank-0.txt").read_text()
    assert waits.count("_engine_run_backward") >= 2  # the main thread's stack, and that of all threads
    assert "phase train" in (_report(tmp_path) / "rank-1.txt").read_text()
    if torch.__version__ >= "2.9":  # which records gloo's collectives
        last = json.loads((_report(tmp_path) / "collectives-0.json").read_text())[-1]
        assert (last["profiling_name"], last["state"]) == ("gloo:all_reduce", "scheduled")
        assert "gloo:all_reduce" in waits
    found_s = _found_s(tmp_path)
    restart_s = float((tmp_path / "restarted").read_text()) - float((tmp_path / "hung").read_text()) - found_s
    record_property("found_s", found_s)
    record_property("restart_s", restart_s)
    print(f"a stopped rank: found after {found_s:.2f} s; first step again {restart_s:.2f} s later")
    assert found_s > TIMEOUT_S / 2


@pytest.mark.parametrize("how", [pytest.param("in Python", marks=pytest.mark.campaign), "in C"])
def test_a_rank_that_hangs_in_code_shows_where(server: JobServer, tmp_path: Path, how: str) -> None:
    log = tmp_path / "log"
    job = server.start(train, tmp_path, how, TIMEOUT_S, nproc=2, log=log)
    try:
        assert job.wait(HANG_S) == EXIT_HUNG, log.read_text()
    finally:
        job.kill("job")
    stuck = (_report(tmp_path) / "rank-1.txt").read_text()
    assert ("stuck_here" if how == "in Python" else "in training_step") in stuck
    status = json.loads((_report(tmp_path).parent / "status.json").read_text())
    assert (status["status"], status["exit_code"], status["global_step"]) == ("hung", EXIT_HUNG, 3)


def test_a_stopped_rank_alone_is_found_by_the_agent(server: JobServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = server.start(train, tmp_path, "stopped", TIMEOUT_S, nproc=1, log=log)
    try:
        assert job.wait(HANG_S) == EXIT_HUNG, log.read_text()
    finally:
        job.kill("job")
    assert re.search(r"rank 0 \(pid \d+\) is stopped by a signal", log.read_text())


def test_without_an_agent_the_others_name_the_stopped_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 ended with exit code 76") as failed:
        run_ranks(train, 2, tmp_path, "stopped", TIMEOUT_S, others_s=1.0)
    assert re.search(r"hang on .* no step for 3 s\. rank 1 \(pid \d+\) is stopped by a signal", str(failed.value))
    assert json.loads((_report(tmp_path).parent / "status.json").read_text())["status"] == "hung"
