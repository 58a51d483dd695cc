"""A fit owns the folders that it saves in, from before it resumes until its end; see also checkpoint/test_saver.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from instep import Trainer
from instep.callbacks import ModelCheckpoint
from instep.checkpoint.lease import Lease
from instep.errors import FolderInUseError
from tests.trainer.toys import Toy, loader, quiet


def trainer_in(root: Path, *callbacks: Any, **settings: Any) -> Trainer:
    given = {"max_epochs": 1, "enable_checkpointing": True, "default_root_dir": root, "callbacks": list(callbacks)}
    return quiet(**{**given, **settings})


def released(folder: Path) -> list[bool]:
    return [json.loads(path.read_text())["released"] for path in folder.glob(".lease-*")]


def test_savers_of_one_run_share_its_folder_and_give_it_back(tmp_path: Path) -> None:
    kept, module = tmp_path / "kept", Toy()
    trainer = trainer_in(tmp_path, ModelCheckpoint(kept), ModelCheckpoint(kept, every_n_train_steps=2, save_top_k=-1))
    trainer.fit(module, loader())
    assert released(kept) == [True]
    trainer.fit(module, loader())
    trainer.validate(module, loader())


@pytest.mark.parametrize("saved", [True, False])
def test_a_second_run_in_a_folder_in_use_is_refused(saved: bool, tmp_path: Path) -> None:
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
