"""One run owns the project's folder of states, from its first save until its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from instep import Accelerator
from instep.accelerator import ProjectConfiguration
from instep.checkpoint.lease import Lease
from instep.errors import FolderInUseError, InstepError, LeaseLostError
from tests.accelerator.loops import Net
from tests.helpers.spawn import finish, run_ranks, start_command

LOOP = """
import signal, sys
from pathlib import Path
from tests.accelerator.test_owning import in_project
from instep import Accelerator
accelerator = in_project(Accelerator, sys.argv[1])
if list(Path(sys.argv[1]).rglob("step-*")):
    accelerator.load_state()
accelerator.save_state()
print("saved", flush=True)
if sys.argv[2] == "stay":
    signal.pause()
"""


def in_project(make: Any, folder: Any) -> Accelerator:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = make(cpu=True, project_config=project)
    accelerator.prepare(Net())
    return accelerator


def loop(folder: Path, then: str) -> Any:
    """Another process that has saved, once its first line was read."""
    return start_command([sys.executable, "-c", LOOP, str(folder), then], cwd=Path(__file__).parents[2])


def released(folder: Path) -> list[bool]:
    return [json.loads(path.read_text())["released"] for path in (folder / "checkpoints").glob(".lease-*")]


def test_another_loop_in_the_folder_is_refused_until_it_has_ended(tmp_path: Path) -> None:
    mine = in_project(Accelerator, tmp_path)
    with loop(tmp_path, "stay") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        with pytest.raises(FolderInUseError, match=f"pid {process.pid}: "):
            mine.save_state()
        assert len(list(tmp_path.glob("checkpoints/step-*"))) == 1
        process.kill()
        process.wait()
    mine.load_state()
    assert mine.save_state().is_dir(), "a dead one's folder is taken over"
    assert released(tmp_path) == [False]
    mine.end_training()
    assert released(tmp_path) == [True]
    with loop(tmp_path, "go") as process:
        assert finish(process).returncode == 0
    assert released(tmp_path) == [True], "at the exit too"


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
    first._states.saver.close()


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
