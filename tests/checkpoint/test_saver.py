"""One save is one call: collected, written, verified, ranked, and only then older ones are deleted.

By a Trainer and by an Accelerator, at once and beside the training: all through `instep/checkpoint/saver.py`. Fit and
script save after each of four steps, in a folder that is theirs until they end.
"""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep import Accelerator, Callback, TrainModule
from instep.accelerator import ProjectConfiguration
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import CheckpointStore, KeepNewest, load_weights
from instep.checkpoint.files import Files
from instep.checkpoint.lease import Lease
from instep.errors import CheckpointError, CorruptCheckpointError, FolderInUseError, LeaseLostError, RemoteError
from instep.loggers import CSVLogger
from tests.helpers.spawn import HANG_S, run_ranks
from tests.trainer.toys import Toy, loader, quiet, weights

Act = Callable[[int], Any]
Weights = dict[int, dict[str, Tensor]]


def by_trainer(root: Path, keep: int, background: bool, act: Act = int) -> Weights:
    """Train four steps and save after each; `act` is called before each save. The weights at each."""
    seen: Weights = {}

    class Looks(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen[trainer.global_step] = weights(module)
            act(trainer.global_step)

    saver = ModelCheckpoint(root / "checkpoints", every_n_train_steps=1, keep=KeepNewest(keep), background=background)
    quiet(max_steps=4, callbacks=[Looks(), saver], enable_checkpointing=True).fit(Toy(), loader())
    return seen


def by_hand(root: Path, keep: int, background: bool, act: Act = int) -> Weights:
    """The same with an Accelerator."""
    seen: Weights = {}
    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=keep)
    accelerator = Accelerator(cpu=True, project_config=project)
    module = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    try:
        for step in range(1, 5):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            seen[step] = weights(module)
            act(step)
            accelerator.save_state(background=background)
        accelerator.end_training()  # which waits for the last one
    finally:
        accelerator._states.pending = None
        accelerator._states.close()
        accelerator.free_memory()
    return seen


pytestmark = [
    pytest.mark.parametrize("run", [by_trainer, by_hand]),
    pytest.mark.parametrize("background", [False, True], ids=["at once", "beside"]),
]


def there(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "checkpoints").glob("step-*"))


def trace(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, str], Any]) -> None:
    """Call `act` with each operation on a disk and its path, before it."""
    monkeypatch.setattr(Files, "_before", lambda self, operation, path, detail=None: act(operation, str(path)))


def full_disk(operation: str, path: str, step: int = 3) -> None:
    if operation == "write" and f"step-{step:08d}" in path:
        raise OSError(errno.ENOSPC, "no space left on device", path)


def test_a_checkpoint_holds_the_instant_of_its_save(
    run: Any, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, held = threading.Event(), []

    def hold(operation: str, path: str) -> None:
        beside = threading.current_thread().name == "instep-save"
        if beside and operation == "create" and path.endswith("model.safetensors") and "step-00000003" in path:
            held.append(trained.wait(HANG_S))  # until the next step is done

    trace(monkeypatch, hold)
    seen = run(tmp_path, 2, background, lambda step: step == 4 and trained.set())
    assert held == [True] * background
    assert there(tmp_path) == ["step-00000003-1", "step-00000004-1"], "older ones are deleted"
    for step in (3, 4):
        saved = load_weights(tmp_path / "checkpoints" / f"step-0000000{step}-1")
        assert all(torch.equal(saved[name], value) for name, value in seen[step].items())
    assert not all(torch.equal(seen[3][name], value) for name, value in seen[4].items())


def test_nothing_older_is_deleted_for_one_that_does_not_verify(
    run: Any, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = CheckpointStore.verify_together

    def damaged(self: CheckpointStore, path: Any) -> list[str]:
        return ["it is too short"] if "step-00000003" in str(path) else verify(self, path)

    monkeypatch.setattr(CheckpointStore, "verify_together", damaged)
    with pytest.raises(CorruptCheckpointError, match=r"step-00000003-1 does not .*too short"):
        run(tmp_path, 1, background)
    assert there(tmp_path) == ["step-00000002-1", "step-00000003-1"]


def test_a_failed_save_leaves_the_one_before_and_shows_at_the_next_call(
    run: Any, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(monkeypatch, full_disk)
    steps: list[int] = []
    with pytest.raises(CheckpointError, match=r"no space left(.|\n)*Free some space"):
        run(tmp_path, 1, background, steps.append)
    assert steps[-1] == (4 if background else 3)
    assert there(tmp_path) == ["step-00000002-1"]
    assert not list((tmp_path / "checkpoints").glob(".saving-*")), "nothing half is left"


def test_the_error_of_the_last_save_ends_the_run(
    run: Any, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(monkeypatch, lambda operation, path: full_disk(operation, path, 4))
    with pytest.raises(CheckpointError, match="no space left"):
        run(tmp_path, 1, background)
    assert there(tmp_path) == ["step-00000003-1"]


def test_a_checkpoint_counts_although_an_older_one_cannot_be_deleted(
    run: Any, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = CheckpointStore._delete

    def stuck(self: CheckpointStore, folder: Path) -> None:
        if folder.name == "step-00000002-1":
            raise CheckpointError(f"could not delete {folder}")
        delete(self, folder)

    monkeypatch.setattr(CheckpointStore, "_delete", stuck)
    with pytest.raises(CheckpointError, match="could not delete"):
        run(tmp_path, 1, background)
    assert there(tmp_path) == ["step-00000002-1", "step-00000003-1"]
    assert not CheckpointStore(tmp_path / "checkpoints").verify("step-00000003-1")


# ---- the folder


def leases(root: Path) -> list[Path]:
    return list((root / "checkpoints").glob(".lease-*"))


def test_the_folder_of_another_run_is_refused_until_it_has_ended(run: Any, background: bool, tmp_path: Path) -> None:
    theirs, steps = Lease.take(tmp_path / "checkpoints", "theirs"), []
    with pytest.raises(FolderInUseError, match="run theirs"):
        run(tmp_path, 1, background, steps.append)
    assert steps == ([] if run is by_trainer else [1]), "a fit finds it before its first step"
    assert not there(tmp_path)
    theirs.release()
    run(tmp_path, 1, background)
    assert [json.loads(path.read_text())["released"] for path in leases(tmp_path)] == [True]


@pytest.mark.filterwarnings("ignore:what an earlier run left")  # it is not swept either
def test_who_lost_the_folder_saves_nothing_more(run: Any, background: bool, tmp_path: Path) -> None:
    def take_over(step: int) -> None:
        if step == 3:
            [path] = leases(tmp_path)
            content = {**json.loads(path.read_text()), "id": "another", "run_id": "theirs"}
            (tmp_path / "theirs").write_text(json.dumps(content))
            (tmp_path / "theirs").rename(path.with_name(".lease-00000009"))

    with pytest.raises(LeaseLostError, match="run theirs"):
        run(tmp_path, 9, background, take_over)
    assert there(tmp_path) in (["step-00000001-1", "step-00000002-1"], ["step-00000001-1"][:background])
    assert json.loads((tmp_path / "checkpoints" / ".lease-00000009").read_text())["id"] == "another"


@pytest.mark.filterwarnings("ignore:what an earlier run left")  # it is not swept either
def test_a_folder_that_vanished_is_an_error_and_not_made_again(run: Any, background: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match=str(folder)):
        run(tmp_path, 1, background, lambda step: step == 3 and folder.rename(tmp_path / "away"))
    assert not there(tmp_path)


# ---- ranks


def on_two_ranks(run: Any, background: bool, root: Path, bad: int) -> list[str]:
    """Save in a folder of another run, then on a disk that is full for one rank; the errors."""
    kinds = []
    with pytest.MonkeyPatch.context() as patch:
        trace(patch, lambda operation, path: path.endswith(f"rank-{bad:05d}.json") and full_disk(operation, path))
        for folder in (root / "theirs", root):
            try:
                run(folder, 1, background)
            except (CheckpointError, RemoteError) as error:
                kinds.append(type(error).__name__)
    return kinds


@pytest.mark.dist
@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_one_rank_is_every_ranks(run: Any, background: bool, bad: int, tmp_path: Path) -> None:
    theirs = Lease.take(tmp_path / "theirs" / "checkpoints", "theirs")
    full = ["CheckpointError" if rank == bad else "RemoteError" for rank in (0, 1)]
    kinds = [["FolderInUseError", full[0]], ["RemoteError", full[1]]]
    assert run_ranks(on_two_ranks, 2, run, background, tmp_path, bad) == kinds
    assert (there(tmp_path / "theirs"), there(tmp_path)) == ([], ["step-00000002-1"])
    theirs.release()


def test_a_logger_that_fails_after_a_save_leaves_the_books_true(run: Any, background: bool, tmp_path: Path) -> None:
    if run is not by_trainer:
        pytest.skip("an Accelerator tells no logger of its states")

    class Failing(CSVLogger):
        def after_save_checkpoint(self, path: Path) -> None:
            if "step-00000002" in path.name:
                raise ValueError("the tracker is gone")

    saver = ModelCheckpoint(tmp_path / "made", every_n_train_steps=1, background=background, on_error="warn")
    with pytest.warns(UserWarning, match="the tracker is gone"):
        quiet(max_steps=3, logger=Failing(tmp_path), callbacks=[saver], enable_checkpointing=True).fit(Toy(), loader())
    assert [Path(one.key).exists() for one in saver.saved] == [True] * len(saver.saved)
    assert Path(saver.best_model_path).exists()
    assert Path(saver.last_model_path).name == "step-00000003-1"
