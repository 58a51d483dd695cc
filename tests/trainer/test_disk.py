"""Ranks that see different disks, or fail alone: the main process's view holds, and an error is everybody's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import Callback, Trainer
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import CheckpointStore
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet

pytestmark = pytest.mark.dist


def rank() -> int:
    return int(os.environ["RANK"])


def trainer_in(root: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    given = {"max_epochs": 1, "enable_checkpointing": True, "default_root_dir": root, "callbacks": list(callbacks)}
    return quiet(**{**given, **settings})


def fit(root: Path, *callbacks: Callback, module: Toy | None = None, ckpt_path: Any = None, **settings: Any) -> Trainer:
    trainer = trainer_in(root, *callbacks, **settings)
    trainer.fit(module or Toy(), loader(), ckpt_path=ckpt_path)
    return trainer


def look_differently(root: Path) -> dict[str, Any]:
    """The second rank is given other paths, and sees no folder."""
    warnings.simplefilter("error")
    kept, result = root / "kept", {}
    fit(root, ModelCheckpoint(kept, every_n_train_steps=1, save_top_k=-1))
    path = CheckpointStore(kept).scan()[0].path if rank() == 0 else Path("nowhere")
    result["path"] = fit(
        root, ModelCheckpoint(kept, every_n_train_steps=1, save_top_k=-1), max_epochs=2, ckpt_path=path
    )
    isdir, os.path.isdir = os.path.isdir, (os.path.isdir if rank() == 0 else lambda path: False)
    saver = ModelCheckpoint(kept, every_n_train_steps=1, save_top_k=-1)
    result["run"] = fit(root, saver, max_epochs=3, ckpt_path="auto")
    os.path.isdir = isdir
    result = {name: (trainer.global_step, trainer.log_dir) for name, trainer in result.items()}
    return {**result, "kept": (sorted(saver.best_k_models), saver.best_model_path, saver.last_model_path)}


def test_the_main_process_looks_at_the_disk(tmp_path: Path) -> None:
    first, second = run_ranks(look_differently, 2, tmp_path)
    assert first == second
    assert first["path"][0] == 4
    assert first["run"] == (6, str(tmp_path / "instep_runs" / "version_1")), "in the folder of the run before"
    assert len(first["kept"][0]) == 6


# ---- an error on one rank, where the others wait


class NoData(Toy):
    def prepare_data(self) -> None:
        raise ValueError("no network")


class Unsavable(Toy):
    def configure_optimizers(self) -> Any:
        owner = object() if self.global_rank == 0 else None  # of whom it is saved
        return torch.optim.SGD([{"params": self.parameters(), "owner": owner}], lr=0.1)


class FailingState(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step:
            raise ValueError("no state")


def missing(root: Path) -> None:
    fit(root, ckpt_path=root / "missing")


def a_file_in_the_way(root: Path) -> None:
    (root / "blocked").mkdir(exist_ok=True)
    (root / "blocked" / "instep_runs").write_text("")
    fit(root / "blocked")


def no_data(root: Path) -> None:
    fit(root, module=NoData())


def unsavable(root: Path) -> None:
    fit(root, ModelCheckpoint(root / "kept"), module=Unsavable())


def no_state_at_first(root: Path) -> None:
    fit(root, FailingState(0), ModelCheckpoint(root / "kept"))


def no_state_later(root: Path) -> None:
    fit(root, FailingState(1), ModelCheckpoint(root / "kept", every_n_train_steps=1))


FAILURES: list[tuple[Callable[[Path], None], int, str]] = [
    (missing, 0, "CheckpointNotFoundError"),
    (a_file_in_the_way, 0, "InstepError"),
    (no_data, 0, "ValueError"),
    (unsavable, 0, "UnsavableStateError"),
    (no_state_at_first, 1, "ValueError"),
    (no_state_later, 1, "ValueError"),
]


def fail_in_turn(root: Path) -> list[str]:
    kinds = []
    for run, _, _ in FAILURES:
        try:
            run(root)
        except Exception as error:
            kinds.append(type(error).__name__)
        else:
            kinds.append("")
    return kinds


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    kinds = run_ranks(fail_in_turn, 2, tmp_path)
    for number, (run, failing, kind) in enumerate(FAILURES):
        got = kinds[failing][number], kinds[1 - failing][number]
        assert got == (kind, "RemoteError"), run.__name__
