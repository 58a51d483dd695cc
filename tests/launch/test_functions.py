from __future__ import annotations

import sys

import pytest

from instep.errors import UsageError
from instep.launch.functions import debug_launcher, notebook_launcher
from tests.helpers.spawn import run_command

PROGRAM = """
import sys

from instep import PartialState, debug_launcher, notebook_launcher
from instep.distributed import gather_object


def who(greeting):
    state = PartialState(cpu=True)
    return greeting, state.process_index, gather_object(state.process_index)


launcher = {"debug": debug_launcher, "notebook": notebook_launcher}[sys.argv[1]]
print(launcher(who, ("hello",), num_processes=2))
"""


@pytest.mark.dist
@pytest.mark.parametrize("launcher", ["debug", "notebook"])
def test_a_function_runs_as_two_ranks(launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_command([sys.executable, str(program), launcher], timeout_s=90)
    assert done.returncode == 0, done.stderr
    assert "[('hello', 0, [0, 1]), ('hello', 1, [0, 1])]" in done.stdout


def test_a_rank_does_not_launch(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="rank of a running job"):
        debug_launcher(print)


def test_the_number_must_be_positive():
    with pytest.raises(UsageError, match="num_processes=0"):
        notebook_launcher(print, num_processes=0)
