"""SIGKILL at every operation of a save, and at random instants of a real training; then the same command again."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from instep.checkpoint import CheckpointStore, LocalFiles, files
from tests.checkpoint.helpers import ACTIONS, NEW, OLD, left_over, value_of, writes
from tests.checkpoint.killing import Campaign, lost, results_of
from tests.checkpoint.victim import Board, Way, train
from tests.helpers.faults import FaultPlan, exit_status_of
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


def do_not_wait_for_the_disk() -> None:
    """A killed process loses nothing that the system has; hundreds of real fsyncs would only take time."""
    files._fsync = lambda fd: None


# ---- at every operation of a store


def kill_everywhere(folder: str, name: str) -> dict[str, int]:
    """Kill a child at each operation; how many there were of each, once what was left passed every check."""
    do_not_wait_for_the_disk()
    (action,) = (action for action in ACTIONS if action.__name__ == name)
    CheckpointStore(Path(folder, "count")).save(1, writes(OLD))
    plan = FaultPlan()
    action(CheckpointStore(Path(folder, "count"), LocalFiles(plan)))
    operations = [operation for operation, _ in plan.operations]
    seen: list[float] = []
    for number in range(len(operations)):
        root = Path(folder, str(number))
        store = CheckpointStore(root)
        store.save(1, writes(OLD))
        doomed = CheckpointStore(root, LocalFiles(FaultPlan().kill_at(number)))
        assert exit_status_of(lambda doomed=doomed: action(doomed)) == -signal.SIGKILL
        newest = store.newest_verified()
        assert newest is not None, f"nothing left after a kill at {operations[number]} ({number})"
        seen.append(value_of(store.read(newest.path)))
        assert seen[-1] in (OLD, NEW)
        store.sweep()
        assert left_over(store) == []
        action(store) if newest.path.name == "step-00000001-1" else None  # the same command again
        again = store.newest_verified()
        assert again is not None
        assert value_of(store.read(again.path)) == NEW
        shutil.rmtree(root)
    assert seen == sorted(seen), "the new one was there and went away again"
    assert seen[0] == OLD
    assert seen[-1] == NEW
    return {operation: operations.count(operation) for operation in operations}


@pytest.mark.parametrize("name", [action.__name__ for action in ACTIONS])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path: Path, name: str) -> None:
    (count,) = run_ranks(kill_everywhere, 1, str(tmp_path), name, timeout_s=100)
    assert count["create"] == count["fsync"] == 7  # 3 files, 2 of which are states in two parts, and the manifest
    assert count["write"] >= 7
    assert count["rename"] == (2 if name == "save_then_delete_the_old" else 1)


# ---- at every operation of a save that a Trainer makes


def kill_training_everywhere(folder: str, way: Way) -> dict[str, int]:
    """Kill a training at each operation between the saves of steps 4 and 5, and run the same command again."""
    do_not_wait_for_the_disk()
    plan, whole = FaultPlan(), Path(folder, "whole")
    whole.mkdir()
    with plan.everywhere():
        train(whole, way)
    expected = results_of(whole, way)
    assert expected[0]["exactly once"]
    assert expected[0]["best are there"]
    steps = [next((step for step in (4, 5) if f"step-{step:08d}" in str(path)), 0) for _, path in plan.operations]
    span = range(steps.index(4), steps.index(5))
    for number in span:
        root = Path(folder, str(number))
        root.mkdir()

        def killed(root: Path = root, number: int = number) -> None:
            with FaultPlan().kill_at(number).everywhere():
                train(root, way)

        where = f"killed at {plan.operations[number]} ({number})"
        assert exit_status_of(killed) == -signal.SIGKILL, where
        board = Board(root / "board-0")
        assert lost(root, board) is None, where
        assert board.read()[3] >= 3, where
        assert exit_status_of(lambda root=root: train(root, way)) == 0, where
        assert results_of(root, way) == expected, where
        assert not list(root.rglob(".saving-*")), where
        shutil.rmtree(root)
    names = [plan.operations[number][0] for number in span]
    return {name: names.count(name) for name in names}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("background", [False, True], ids=["", "background"])
def test_a_training_killed_at_any_operation_of_its_saves_ends_bit_for_bit_the_same(
    background: bool, tmp_path: Path
) -> None:
    """The newest is saved and the one before deleted, then what a validation measured is saved as one of the best."""
    way = Way(ranks=1, batch_size=4, epochs=1, background=background)
    (count,) = run_ranks(kill_training_everywhere, 1, str(tmp_path), way, timeout_s=280.0)
    assert count["rename"] >= 3, "two saves and a delete"
    assert count["create"] == count["fsync"] >= 12
    assert count["unlink"] >= 6


# ---- at random instants


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the job's processes in /proc and waits for them by pidfd")
def test_a_training_killed_at_random_instants_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    seed = int(os.environ.get("INSTEP_KILL_SEED", "20240501"))
    print(f"INSTEP_KILL_SEED={seed}")
    campaign = Campaign(tmp_path, seed)
    campaign.run(20, print)
    assert len(campaign.kills) == 20
    assert {kill.target for kill in campaign.kills} == {"job", "rank", "agent"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the job's processes in /proc and waits for them by pidfd")
@pytest.mark.parametrize(
    "strategy, background, kills, earliest",
    [
        ("fsdp", False, 6, 0.3),
        ("fsdp", True, 6, 0.3),
        pytest.param("deepspeed_stage_2", True, 3, 0.7, marks=pytest.mark.deepspeed),  # it takes long to start
    ],
)
def test_a_sharded_training_killed_at_random_instants_ends_bit_for_bit_the_same(
    strategy: str, background: bool, kills: int, earliest: float, tmp_path: Path
) -> None:
    seed = int(os.environ.get("INSTEP_KILL_SEED", "20240501"))
    print(f"INSTEP_KILL_SEED={seed}")
    campaign = Campaign(tmp_path, seed, [Way(strategy=strategy, background=background)], earliest=earliest)
    campaign.run(kills, print)
    assert len(campaign.kills) == kills
    assert any(kill.where in ("training", "save", "delete", "validation") for kill in campaign.kills)
