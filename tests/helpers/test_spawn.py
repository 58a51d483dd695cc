from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import spawn
from tests.helpers.spawn import RanksFailed, run_command, run_ranks


def _sum(start: float) -> tuple[int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def _fail_on_one() -> None:
    print("said before")
    if os.environ["RANK"] == "1":
        raise ValueError("only here")


def _hang_on_one(here: Path) -> None:
    if os.environ["RANK"] == "1":
        here.touch()
        threading.Event().wait()
    while not here.exists():
        threading.Event().wait(0.01)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _environment() -> tuple[str, int]:
    return os.environ["A_TEST_VALUE"], torch.get_num_threads()


@pytest.mark.dist
def test_ranks_return_their_results_in_order() -> None:
    assert run_ranks(_sum, 2, 10.0) == [(0, 21.0), (1, 21.0)]


@pytest.mark.dist
def test_environment_of_the_moment_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TEST_VALUE", "first")
    assert run_ranks(_environment, 1) == [("first", 1)]
    assert run_ranks(_environment, 1, env={"A_TEST_VALUE": "second"}) == [("second", 1)]


@pytest.mark.dist
def test_a_failing_rank_is_named_with_traceback_and_output() -> None:
    with pytest.raises(RanksFailed, match="ValueError: only here") as caught:
        run_ranks(_fail_on_one, 2)
    assert list(caught.value.errors) == [1]
    assert "said before" in str(caught.value)


@pytest.mark.dist
def test_a_hanging_rank_is_killed_and_its_stack_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([spawn.wait, lambda *_, **__: []])  # the first rank's end, then the limit is over
    monkeypatch.setattr(spawn, "wait", lambda pipes, timeout: next(answers)(pipes, timeout=timeout))
    with pytest.raises(RanksFailed, match="ran past 600") as caught:
        run_ranks(_hang_on_one, 2, tmp_path / "hangs")
    assert list(caught.value.errors) == [1]
    assert "_hang_on_one" in str(caught.value)


@pytest.mark.dist
def test_a_killed_rank_is_reported_by_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        run_ranks(_die, 1)


def test_a_command_past_its_deadline_is_killed() -> None:
    with pytest.raises(AssertionError, match="ran past"):
        run_command([sys.executable, "-c", "import threading; threading.Event().wait()"], timeout_s=0.5)
    assert run_command([sys.executable, "-c", "print('x')"]).stdout == "x\n"
