"""mpirun: two real processes, which are preempted and go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.spawn import HANG_S, finish, run_command, start_command
from tests.launch.ways import RAISES, REPO, UNLAUNCHED, check_error_was_told, same_weights

pytestmark = [pytest.mark.mpi, pytest.mark.dist]

MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable]
ENV = {**UNLAUNCHED, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_ranks_of_mpirun_that_are_asked_to_stop_save_end_their_hooks_and_go_on(tmp_path: Path) -> None:
    """For mpirun kills the other ranks once the first one has ended with a code other than 0."""
    held = tmp_path / "held"
    words = [*MPIRUN, str(Path(__file__).with_name("held_job.py")), *map(str, (tmp_path / "out.json", tmp_path, held))]
    with start_command(words, env={**ENV, "SLOW_S": "1.5"}, cwd=tmp_path) as process:
        deadline = time.monotonic() + HANG_S
        while len(os.listdir(held) if held.exists() else []) < 2 and process.poll() is None:
            assert time.monotonic() < deadline, "the ranks did not come to the step"
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        stopped = finish(process)
    assert stopped.returncode == 75, stopped.stderr
    assert "rank 0 ended in step" in stopped.stdout
    done = run_command(words, env=ENV, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Resuming from" in done.stdout
    result = same_weights(tmp_path / "out.json")
    assert (result["launcher"], result["world_size"], result["num_nodes"]) == ("openmpi", 2, 1)


def test_an_error_of_a_rank_of_mpirun_is_told_and_ends_all(tmp_path: Path) -> None:
    done = run_command([*MPIRUN, *RAISES, str(tmp_path)], env={**ENV, "PYTHONPATH": str(REPO)}, cwd=tmp_path)
    check_error_was_told(done, tmp_path)
