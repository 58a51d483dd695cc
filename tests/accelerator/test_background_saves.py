"""`save_state(background=True)`: the state of that instant, known once it has verified."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from instep import Accelerator
from instep.accelerator import ProjectConfiguration
from instep.checkpoint.files import Files
from instep.errors import CheckpointError, UsageError
from tests.accelerator.loops import Net, sgd
from tests.accelerator.test_saving import Counter, step
from tests.helpers.spawn import run_ranks


def prepared(make: Any, folder: Path, **options: Any) -> tuple[Any, Any, Any]:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **options)
    accelerator = make(project_config=project)
    model = Net()
    return accelerator, *accelerator.prepare(model, sgd(model))


def test_an_object_is_saved_as_it_was(make: Any, tmp_path: Path) -> None:
    accelerator, *_ = prepared(make, tmp_path)
    counter = Counter(3)
    accelerator.register_for_checkpointing(counter)
    assert accelerator.save_state(background=True) is None
    counter.count = 99
    path = accelerator.wait_for_saves()
    assert accelerator.wait_for_saves() is None
    assert accelerator.load_state() == path
    assert counter.count == 3
    accelerator._states.close()


def test_its_error_comes_with_the_next_save(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = prepared(make, tmp_path)

    def full(self: Files, operation: str, path: Path, detail: Any = None) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, "no space left on device", str(path))

    step(accelerator, model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(Files, "_before", full)
        accelerator.save_state(background=True)
        accelerator._states.pending.wait()
    with pytest.raises(CheckpointError, match="no space left"):
        accelerator.save_state()
    assert accelerator.save_state().name == "step-00000001-1"
    accelerator._states.close()


def test_hooks_that_write_files_are_refused(make: Any, tmp_path: Path) -> None:
    accelerator, *_ = prepared(make, tmp_path)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(UsageError, match="writes files itself"):
        accelerator.save_state(background=True)


def ends(folder: Path) -> list[str]:
    accelerator, model, optimizer = prepared(lambda **kw: Accelerator(cpu=True, **kw), folder)
    step(accelerator, model, optimizer)
    accelerator.save_state(background=True)
    accelerator.end_training()
    return [path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()]


@pytest.mark.dist
def test_the_end_of_training_waits_for_it(tmp_path: Path) -> None:
    assert run_ranks(ends, 2, tmp_path) == [["step-00000001-1"]] * 2
