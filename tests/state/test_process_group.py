"""How a process ends while others still wait for it: with its own error and exit status, at once."""

from __future__ import annotations

import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.spawn import finish, free_port, start_command

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from instep.state import PartialState

state = PartialState(cpu=True, timeout=300)
control = state.control_group
state.wait_for_everyone()
if state.is_main_process:
    under_way = dist.all_reduce(torch.zeros(2), group=control, async_op=True)
    {ending}
else:
    dist.all_reduce(torch.zeros(3))
"""


def end_like(tmp_path: Path, ending: str) -> tuple[int, str, int, str]:
    """Exit status and stderr of rank 0, which ends that way, and of rank 1, which waits for it in a collective."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM).format(ending=ending))
    job = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(Path.cwd()),
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                start_command([sys.executable, str(program)], env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            )
            for rank in range(2)
        ]
        first, second = finish(ranks[0]), finish(ranks[1])
    return first.returncode, first.stderr, second.returncode, second.stderr


@pytest.mark.dist
def test_a_rank_that_raises_does_not_wait_for_what_is_under_way(tmp_path: Path) -> None:
    status, stderr, other_status, other_stderr = end_like(tmp_path, "raise ValueError('my own error')")
    assert status == 1
    assert "ValueError: my own error" in stderr
    assert other_status == 1
    assert "RuntimeError" in other_stderr


@pytest.mark.dist
@pytest.mark.campaign
def test_an_exit_status_is_kept(tmp_path: Path) -> None:
    assert end_like(tmp_path, "sys.exit(75)")[0] == 75
