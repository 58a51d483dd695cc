"""`ModelCheckpoint(background=True)` and `on_error`, in whole runs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.callbacks import Callback, ModelCheckpoint
from instep.checkpoint import CheckpointStore
from instep.checkpoint.background import BackgroundSaver
from instep.checkpoint.files import Files
from instep.errors import CheckpointError, Preempted, SettingError
from instep.loggers import Logger
from tests.helpers.spawn import HANG_S, run_ranks
from tests.trainer.resuming import Case, Net, assert_same, make_trainer, run_once, seed, train_loader
from tests.trainer.toys import Toy, loader, quiet, weights

DEADLINE_S = HANG_S
Trace = Callable[[str, Path], None]


def trace(monkeypatch: pytest.MonkeyPatch, act: Trace) -> None:
    """Call `act` before every operation on the disk."""
    monkeypatch.setattr(Files, "_before", lambda self, operation, path, detail=None: act(operation, path))


def names(folder: Path) -> list[str]:
    """What lies there, hidden files apart."""
    return sorted(path.name for path in folder.glob("[!.]*"))


def fit(saver: ModelCheckpoint, *callbacks: Callback, **settings: Any) -> Toy:
    module = Toy()
    quiet(**{"max_epochs": 3, "enable_checkpointing": True, "callbacks": [*callbacks, saver], **settings}).fit(
        module, loader()
    )
    return module


class Steps(Callback):
    """The weights after every step; `reached` lets another thread wait for a step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self._changed = threading.Condition()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self._changed:
            self.weights[trainer.global_step] = weights(module)
            self._changed.notify_all()

    def reached(self, step: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: step in self.weights, DEADLINE_S)


class Told(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def _after_save_checkpoint(self, path: Path) -> None:
        assert CheckpointStore(path.parent).verify(path) == []
        self.paths.append(path.name)


def test_books_and_loggers_know_verified_ones_only(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, background=True)
    told, seen = Told(), []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append((trainer.global_step, Path(saver.last_model_path).name, list(told.paths)))

    fit(saver, Looks(), logger=told)
    assert [name for step, name, _ in seen if step == 7] == [""]  # the one of step 4 is settled at step 8
    assert [(name, paths) for step, name, paths in seen if step == 8] == [("step-00000004-1", ["step-00000004-1"])]
    assert told.paths == [f"step-{step:08d}-1" for step in (4, 8, 12)]
    assert Path(saver.best_model_path).name == Path(saver.last_model_path).name == "step-00000012-1"
    assert [Path(it.key).name for it in saver.saved] == ["step-00000012-1"]
    assert names(tmp_path) == ["step-00000012-1"], "older ones are deleted beside the training"


def full_disk_at(step: int) -> Trace:
    def act(operation: str, path: Path) -> None:
        if operation == "write" and f"step-{step:08d}" in str(path):
            raise OSError(errno.ENOSPC, "no space left on device", str(path))

    return act


@pytest.mark.parametrize("background", [False, True])
def test_on_error_decides_whether_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    trace(monkeypatch, full_disk_at(8))
    steps = Steps()
    with pytest.raises(CheckpointError, match="no space left"):
        fit(ModelCheckpoint(tmp_path / "raise", every_n_train_steps=4, background=background), steps)
    assert max(steps.weights) == (12 if background else 8), "in the background it shows at the next save"
    assert names(tmp_path / "raise") == ["step-00000004-1"], "nothing is deleted for it"
    saver = ModelCheckpoint(tmp_path / "warn", every_n_train_steps=4, background=background, on_error="warn")
    with pytest.warns(UserWarning, match="a checkpoint was not saved, and training goes on: .*no space left"):
        fit(saver)
    assert names(tmp_path / "warn") == ["step-00000012-1"]
    assert [Path(it.key).name for it in saver.saved] == ["step-00000012-1"]


def test_the_error_of_the_last_one_ends_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace(monkeypatch, full_disk_at(12))
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, background=True)
    with pytest.raises(CheckpointError, match="no space left"):
        fit(saver)
    assert Path(saver.last_model_path).name == "step-00000008-1"
    assert names(tmp_path) == ["step-00000008-1"]


def test_another_policy_is_refused() -> None:
    with pytest.raises(SettingError, match="on_error"):
        ModelCheckpoint(on_error="ignore")


class StopAt(Callback):
    def __init__(self, step: int, how: Callable[[Any], Any]) -> None:
        self.step, self.how = step, how

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.how(trainer)


def test_a_preemption_settles_it_and_saves_at_once(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, background=True)
    with pytest.raises(Preempted, match="step-00000006-1"):
        fit(saver, StopAt(5, lambda trainer: trainer.set_trigger("preempted")), trigger_every=1)
    assert names(tmp_path) == ["step-00000004-1", "step-00000006-1"]
    assert [Path(it.key).name for it in saver.saved] == names(tmp_path)


def test_a_preemption_that_cannot_be_saved_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace(monkeypatch, full_disk_at(6))
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, on_error="warn", background=True)
    with pytest.raises(CheckpointError, match="no space left"):
        fit(saver, StopAt(5, lambda trainer: trainer.set_trigger("preempted")), trigger_every=1)
    assert names(tmp_path) == ["step-00000004-1"]


def fails(trainer: Any) -> None:
    raise ValueError("no more")


@pytest.mark.parametrize("save_on_exception", [False, True])
def test_an_exception_lets_the_background_save_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_on_exception: bool
) -> None:
    steps = Steps()

    def hold(operation: str, path: Path) -> None:
        if operation == "create" and "step-00000004" in str(path):
            assert steps.reached(5)

    trace(monkeypatch, hold)
    saver = ModelCheckpoint(
        tmp_path, every_n_train_steps=4, save_top_k=-1, background=True, save_on_exception=save_on_exception
    )
    with pytest.raises(ValueError, match="no more"):
        fit(saver, steps, StopAt(5, fails))
    assert names(tmp_path) == ["step-00000004-1", "step-00000005-1"][: 1 + save_on_exception]
    assert Path(saver.last_model_path).name == "step-00000004-1"


def test_after_ctrl_c_it_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    close = BackgroundSaver.close

    def closes(self: BackgroundSaver, timeout_s: float | None = None) -> None:
        limits.append(timeout_s)
        close(self)

    def interrupt(trainer: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundSaver, "close", closes)
    with pytest.raises(KeyboardInterrupt):
        fit(ModelCheckpoint(tmp_path, every_n_train_steps=4, background=True), StopAt(5, interrupt))
    assert limits == [0.0]


def test_the_users_own_save_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    asked = threading.Event()

    def note(operation: str, path: Path) -> None:
        assert threading.current_thread().name != "instep-save" or asked.wait(DEADLINE_S)
        if operation == "rename":
            order.append("own" if "own" in path.name else "scheduled")

    def asks(trainer: Any) -> None:
        asked.set()
        trainer.save_checkpoint(tmp_path / "own")

    trace(monkeypatch, note)
    fit(ModelCheckpoint(tmp_path, every_n_train_steps=4, background=True), StopAt(5, asks), max_steps=6)
    assert order[:2] == ["scheduled", "own"]


# ---- exact


WINDOWS = Case(every_n_train_steps=1, accumulate=3, background=True)  # of 6 batches an epoch: in it, and at its end


def resumes(case: Case, root: str) -> list[str]:
    """Go on from every checkpoint that was written beside the training; those that ended elsewhere."""
    whole = run_once(Case(**{**vars(case), "background": False}), Path(root, "whole"))
    beside = run_once(case, Path(root, "beside"))
    assert_same(beside, whole, "beside")
    found = CheckpointStore(Path(beside.trainer.checkpoint_callback.last_model_path).parent).scan()
    different: list[str] = []
    for number, info in enumerate(found):
        seed(200 + number)
        rows = [dict(row) for row in beside.rows]
        trainer = make_trainer(case, Path(root, info.path.name), rows)
        module = Net(case.schedule)
        trainer.fit(module, train_loader(case), ckpt_path=info.path)
        mine, theirs = module.state_dict(), beside.module.state_dict()
        if not all(torch.equal(mine[name], theirs[name]) for name in theirs):
            different.append(info.path.name)
    return [f"{len(found)} found", *different]


@pytest.mark.slow
def test_going_on_from_each_ends_the_same(tmp_path: Path) -> None:
    assert resumes(WINDOWS, str(tmp_path)) == ["6 found"]


@pytest.mark.slow
@pytest.mark.dist
def test_going_on_with_two_ranks_ends_the_same(tmp_path: Path) -> None:
    assert run_ranks(resumes, 2, WINDOWS, str(tmp_path)) == [["3 found"]] * 2
