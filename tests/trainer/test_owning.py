"""A fit owns the folders that it saves in, from before it resumes until its end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from instep import Trainer
from instep.callbacks import ModelCheckpoint
from instep.checkpoint.lease import Lease
from instep.errors import CheckpointError, FolderInUseError, LeaseLostError
from tests.trainer.toys import Toy, loader, quiet


def trainer_in(root: Path, *callbacks: Any, **settings: Any) -> Trainer:
    given = {"max_epochs": 1, "enable_checkpointing": True, "default_root_dir": root, "callbacks": list(callbacks)}
    return quiet(**{**given, **settings})


def released(folder: Path) -> list[bool]:
    return [json.loads(path.read_text())["released"] for path in folder.glob(".lease-*")]


def test_another_run_in_the_folder_is_found_before_the_first_step(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    theirs = Lease.take(kept, "theirs")
    module = Toy()
    with pytest.raises(FolderInUseError, match="run theirs"):
        trainer_in(tmp_path, ModelCheckpoint(kept)).fit(module, loader())
    assert module.seen == []
    theirs.release()
    trainer = trainer_in(tmp_path, ModelCheckpoint(kept), ModelCheckpoint(kept, every_n_train_steps=2, save_top_k=-1))
    trainer.fit(module, loader())
    assert released(kept) == [True]
    trainer.fit(module, loader())
    trainer.validate(module, loader())


@pytest.mark.parametrize("saved", [True, False])
def test_the_same_command_twice_at_once(saved: bool, tmp_path: Path) -> None:
    folder = tmp_path / "instep_runs" / "version_0" / "checkpoints"
    if saved:
        trainer_in(tmp_path).fit(Toy(), loader())
    theirs = Lease.take(folder, "the first")
    with pytest.raises(FolderInUseError, match="run the first"):
        trainer_in(tmp_path, max_epochs=2).fit(Toy(), loader(), ckpt_path="auto")
    assert released(folder) == [False]
    theirs.release()
    trainer = trainer_in(tmp_path, max_epochs=2)
    trainer.fit(Toy(), loader(), ckpt_path="auto")
    assert trainer.log_dir == str(tmp_path / "instep_runs" / ("version_0" if saved else "version_1"))
    assert released(Path(trainer.log_dir) / "checkpoints") == [True]


class Acts(Toy):
    """Does something to its folder after the second step."""

    act: Any

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.act()


def acts(act: Any) -> Toy:
    module = Acts()
    module.act = act
    return module


@pytest.mark.filterwarnings("ignore:what an earlier run left")  # it is not swept either
def test_who_lost_the_folder_saves_nothing_more(tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def take_over() -> None:
        (path,) = kept.glob(".lease-*")
        path.rename(path.with_name(".lease-00000009"))
        content = json.loads((kept / ".lease-00000009").read_text())
        (kept / ".lease-00000009").write_text(json.dumps({**content, "id": "another", "run_id": "theirs"}))

    with pytest.raises(LeaseLostError, match="run theirs"):
        trainer_in(tmp_path, ModelCheckpoint(kept)).fit(acts(take_over), loader())
    assert not list(kept.glob("step-*"))
    assert json.loads((kept / ".lease-00000009").read_text())["id"] == "another"


@pytest.mark.filterwarnings("ignore:what an earlier run left")  # it is not swept either
def test_a_folder_that_vanished_is_an_error_and_not_made_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with pytest.raises(CheckpointError, match="kept"):
        trainer_in(tmp_path, ModelCheckpoint(kept)).fit(acts(lambda: shutil.rmtree(kept)), loader())
    assert not list(kept.glob("step-*"))
