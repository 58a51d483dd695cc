"""What the tests of every way of launching share: the program, and what its weights must be.

Example, in a test:

    done = run_command([sys.executable, *launcher, *job(tmp_path / "out.json")], env=UNLAUNCHED)
    assert done.returncode == 0, done.stderr
    assert same_weights(tmp_path / "out.json")["launcher"] == "torchrun"
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.helpers.spawn import Finished, run_command
from tests.helpers.warm import warm_python

REPO = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("digits_job.py")
RAISES = (str(REPO / "tests/trainer/program.py"), "--do", "raise", "--rank", "1", "--root")
# What a rank or a test has in its environment and a program that a person starts has not.
UNLAUNCHED: dict[str, str | None] = dict.fromkeys(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST")
)
# What agents on several machines need, and ranks of other launchers on several do not go without.
SECRET = {"INSTEP_JOB_SECRET": "of the tests, and of nothing else"}
_OURS = """
import sys
from instep.launch.engine import LaunchSpec, run
sys.exit(run(LaunchSpec(int(sys.argv[1]), tuple(sys.argv[2:]))))
"""


def job(out: Path, *args: str) -> tuple[str, ...]:
    """The words after `python` that run the program; see `digits_job` for the arguments."""
    return (str(SCRIPT), str(out), *args)


def same_weights(out: Path) -> dict[str, Any]:
    """Make sure that a job ended with the weights of its world size, and return what it wrote to `out`."""
    result = json.loads(out.read_text())
    expected = reference(result["world_size"])
    assert (result["step"], result["weights"]) == (expected["step"], expected["weights"]), result
    return result


def check_error_was_told(done: Finished, root: Path) -> None:
    """Make sure that a job of `RAISES` under `root`, which has just ended, did so and told its error once."""
    took_s = time.time() - (root / "raised").stat().st_mtime
    print(f"ended {took_s:.1f} s after the error")
    told = done.stderr
    assert done.returncode == 1, told
    assert re.search(r"rank 1 \(host .+, step 4\) failed( with exit code 1)?:\n(\[rank1\]: )?Traceback", told), told
    assert told.count("Traceback (most recent call last)") == 1, told
    assert 'raise ValueError("boom on purpose")' in told, "where it was raised"


@functools.cache
def reference(world: int = 2) -> dict[str, Any]:
    """What the program writes when instep's own agent starts it as `world` ranks; run once per test session."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # the same in all of its processes
    shared = Path(tempfile.gettempdir(), f"instep-digits-{session}-{world}.json")
    atexit.register(shared.unlink, missing_ok=True)
    with open(shared, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        if not text:
            text = _run(world)
            file.write(text)
    return json.loads(text)


def _run(world: int) -> str:
    with tempfile.TemporaryDirectory(prefix="instep-digits-") as folder:
        out = Path(folder, "out.json")
        command = [warm_python(), "-c", _OURS, str(world), *job(out)]
        done = run_command(command, env=UNLAUNCHED, cwd=folder)
        assert done.returncode == 0, done.stderr
        result = json.loads(out.read_text())
        assert result["world_size"] == world, result
        return out.read_text()
