"""One run owns the folder of a project until its end; how another one is refused: checkpoint/test_run_state.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from instep import Accelerator
from instep.accelerator import ProjectConfiguration
from instep.checkpoint.lease import Lease
from instep.errors import InstepError, LeaseLostError
from tests.accelerator.loops import Net
from tests.helpers.spawn import run_command, run_ranks

LOOP = """
import sys, torch
from instep import Accelerator
from instep.accelerator import ProjectConfiguration
project = ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
accelerator.prepare(torch.nn.Linear(1, 1))
accelerator.save_state()
"""


def in_project(make: Any, folder: Any) -> Accelerator:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = make(cpu=True, project_config=project)
    accelerator.prepare(Net())
    return accelerator


def released(folder: Path) -> list[bool]:
    return [json.loads(path.read_text())["released"] for path in (folder / "checkpoints").glob(".lease-*")]


def test_a_program_that_ends_gives_the_folder_back(tmp_path: Path) -> None:
    done = run_command([sys.executable, "-c", LOOP, str(tmp_path)], cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("checkpoints/step-*"))) == 1
    assert released(tmp_path) == [True]


def test_the_folder_is_given_back_and_taken_again(make: Any, tmp_path: Path) -> None:
    first = in_project(lambda cpu, **given: make(**given), tmp_path)
    first.save_state()
    first.save_state(background=True)
    first.free_memory()
    assert released(tmp_path) == [False], "what is under way owns it"
    first.wait_for_saves()
    first.free_memory()
    assert released(tmp_path) == [True]
    first.prepare(Net())
    first.save_state()
    [path] = (tmp_path / "checkpoints").glob(".lease-*")
    path.write_text(json.dumps({**json.loads(path.read_text()), "id": "another run's"}))
    with pytest.raises(LeaseLostError):
        first.save_state()
    first._states.close()


def two_of_a_job(folder: Path) -> list[str]:
    accelerator = in_project(Accelerator, folder)
    said = []
    for _ in range(2):
        try:
            said.append(accelerator.save_state().name)
        except InstepError as error:
            said.append(type(error).__name__)
    accelerator.end_training()
    return said


@pytest.mark.dist
def test_the_ranks_of_a_job_own_it_together(tmp_path: Path) -> None:
    assert run_ranks(two_of_a_job, 2, tmp_path) == [["step-00000000-1", "step-00000000-2"]] * 2
    assert released(tmp_path) == [True]
    theirs = Lease.take(tmp_path / "checkpoints", "theirs")
    assert run_ranks(two_of_a_job, 2, tmp_path) == [["FolderInUseError"] * 2, ["RemoteError"] * 2]
    theirs.release()
