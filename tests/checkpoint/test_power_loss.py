"""Power loss: the log of a store's operations is cut anywhere, and what was not fsynced is lost in any subset."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from instep.checkpoint import CheckpointStore, LocalFiles, lease
from instep.checkpoint.lease import Lease
from instep.utils import atomic, process_id
from tests.checkpoint.helpers import left_over, value_of, writes
from tests.checkpoint.killing import lost, results_of
from tests.checkpoint.victim import Board, Way, train
from tests.helpers.disk import Disk, losses
from tests.helpers.faults import FaultPlan, exit_status_of
from tests.helpers.spawn import run_ranks

INTERVAL_S = 0.05  # of the leases here


def two_saves_and_a_delete(root: Path) -> FaultPlan:
    """The log; a mark follows each thing that was reported as done."""
    plan = FaultPlan()
    store = CheckpointStore(root / "runs" / "checkpoints", LocalFiles(plan))
    for step in (1, 2):
        store.save(step, writes(float(step)))
        plan.mark(f"saved {step}")
    store.delete("step-00000001-1")
    plan.mark("deleted 1")
    store.save(2, writes(3.0))
    plan.mark("saved 2 again")
    return plan


VALUES = {(1, 1): 1.0, (2, 1): 2.0, (2, 2): 3.0}
REPORTED = {"saved 1": (1, 1), "saved 2": (2, 1), "deleted 1": (2, 1), "saved 2 again": (2, 2)}


def check(root: Path, reported: tuple[int, int] | None) -> tuple[int, int] | None:
    """What a start after the power loss finds; fails where it is damaged, or older than what was reported."""
    store = CheckpointStore(root / "runs" / "checkpoints")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a damaged one in plain sight would be passed over with a warning
        newest = store.newest_verified()
    found = None if newest is None else (newest.manifest.step, newest.manifest.attempt)
    if newest is not None:
        assert value_of(store.read(newest.path)) == VALUES[newest.manifest.step, newest.manifest.attempt]
    if reported is not None:
        assert found is not None
        assert found >= reported
    return found


def go_on(root: Path) -> None:
    """The same command finds a store that it can use."""
    store = CheckpointStore(root / "runs" / "checkpoints")
    store.sweep()
    assert value_of(store.read(store.save(9, writes(9.0)))) == 9.0
    assert all(name.startswith(".saving-") for name in left_over(store))  # of this process, which lives


def lose_power_everywhere(
    plan: FaultPlan, root: Path, look: Callable[[str | None, int, int], object], subsets: int = 4
) -> int:
    """Cut the log at every operation, lose power in several ways, and look at what is left; how many there were.

    `look` gets the last mark, the operation's number and the way's; the folder is where it was.
    """
    disk, last, count = Disk(root), None, 0
    for number, operation in enumerate([*plan.log, ("mark", Path("end"), None)]):
        for way, keep in enumerate(losses(number, subsets)):
            shutil.rmtree(root)
            disk.after_power_loss(root, keep)
            try:
                look(last, number, way)
            except BaseException as error:
                raise AssertionError(f"power lost in way {way} before operation {number}, {operation[:2]}") from error
            count += 1
        disk.do(operation)
        last = str(operation[1]) if operation[0] == "mark" else last
    return count


def test_every_power_loss_leaves_what_was_reported_as_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.utils.atomic.fsync", lambda fd: None)  # the log has them
    root = tmp_path / "real"
    root.mkdir()
    found: set[tuple[int, int] | None] = set()

    def look(last: str | None, number: int, way: int) -> None:
        found.add(check(root, None if last is None else REPORTED[last]))
        if way == 2:
            go_on(root)

    count = lose_power_everywhere(two_saves_and_a_delete(root), root, look)
    assert found == {None, *VALUES}
    assert count > 540


@pytest.mark.parametrize(
    ("left_out", "of"),
    [
        ("fsync", "model.safetensors"),
        ("fsync", "manifest.json"),
        ("fsync_folder", ".saving-"),
        ("fsync_folder", "checkpoints"),
        ("fsync_folder", "runs"),
    ],
)
def test_each_fsync_is_needed(left_out: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the same check finds a loss: the check can fail."""
    monkeypatch.setattr("instep.utils.atomic.fsync", lambda fd: None)
    root = tmp_path / "real"
    root.mkdir()
    plan = two_saves_and_a_delete(root)
    plan.log = [it for it in plan.log if not (it[0] == left_out and it[1].name.startswith(of))]
    with pytest.raises(AssertionError, match="power lost in way"):
        lose_power_everywhere(plan, root, lambda last, *_: check(root, None if last is None else REPORTED[last]))


def after_a_reboot(root: Path, way: Way) -> None:
    """The same command, in a system that was started again: no process of before is known to it."""
    process_id._boot_id = lambda: "another boot"
    train(root, way)


def train_and_lose_power(folder: str, way_to_train: Way) -> tuple[int, int]:
    """The log of a training, cut everywhere up to its fourth step; how many losses were looked at, and resumed from."""
    atomic.fsync = lambda fd: None
    # A lease of before the reboot is watched for three of its intervals; one that was lost in part, of the default.
    lease.INTERVAL_S = INTERVAL_S
    Lease.take.__func__.__kwdefaults__ = {"interval_s": INTERVAL_S}
    plan, root, save = FaultPlan(), Path(folder, "real"), CheckpointStore.save
    root.mkdir()

    def saving(store: CheckpointStore, step: int, *args: Any, **kwargs: Any) -> Path:
        path = save(store, step, *args, **kwargs)
        plan.mark(str(step))
        return path

    with plan.everywhere(), mock.patch.object(CheckpointStore, "save", saving):
        train(root, way_to_train)
    expected = results_of(root, way_to_train)
    plan.log = plan.log[: 1 + max(number for number, it in enumerate(plan.log) if it[:2] == ("mark", Path("4")))]
    resumed = 0

    def look(last: str | None, number: int, way: int) -> None:
        nonlocal resumed
        board = Board(root / "board-0")
        board.saved(int(last or 0))
        assert lost(root, board) is None
        if way == 2 and number % 64 == 0:
            resumed += 1
            assert exit_status_of(lambda: after_a_reboot(root, way_to_train)) == 0
            assert results_of(root, way_to_train) == expected

    return lose_power_everywhere(plan, root, look, subsets=1), resumed


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_training_survives_every_power_loss(tmp_path: Path) -> None:
    way = Way(ranks=1, batch_size=4, epochs=1)
    ((count, resumed),) = run_ranks(train_and_lose_power, 1, str(tmp_path), way, timeout_s=3500.0)
    assert count > 450
    assert resumed > 2
