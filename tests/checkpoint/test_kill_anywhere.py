"""SIGKILL at every operation of a save, and at random instants of a real training; then the same command again."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import CheckpointStore, LocalFiles
from instep.utils import atomic
from tests.checkpoint.helpers import ACTIONS, NEW, OLD, left_over, value_of, writes
from tests.checkpoint.killing import MONITORED, WAYS, Campaign, lost, results_of
from tests.checkpoint.victim import PHASES, Board, Way, train
from tests.helpers.faults import FaultPlan, exit_status_of
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


def do_not_wait_for_the_disk() -> None:
    """A killed process loses nothing that the system has; hundreds of real fsyncs would only take time."""
    atomic.fsync = lambda fd: None


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
    (count,) = run_ranks(kill_everywhere, 1, str(tmp_path), name)
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
    every = int(os.environ.get("INSTEP_KILL_EVERY", 4 if way.background else 3))  # the same ones, in another thread
    for number in span[every // 4 :: every]:
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
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["", "background"])
def test_a_training_killed_at_any_operation_of_its_saves_ends_bit_for_bit_the_same(
    background: bool, tmp_path: Path
) -> None:
    """The newest is saved and the one before deleted, then what a validation measured is saved as one of the best.

    At every third operation, and in the background at every fourth; at all with INSTEP_KILL_EVERY=1.
    """
    way = Way(ranks=1, batch_size=4, epochs=1, background=background)
    (count,) = run_ranks(kill_training_everywhere, 1, str(tmp_path), way, timeout_s=3500.0)
    assert count["rename"] >= 3, "two saves and a delete"
    assert count["create"] == count["fsync"] >= 12
    assert count["unlink"] >= 6


# ---- at every operation of a save of which each rank writes a part


def start(root: Path, way: Way, plans: Sequence[FaultPlan]) -> list[int]:
    """Train as one forked process for each plan; their ends, negative for a signal."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def rank(number: int) -> None:
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": len(plans), "LOCAL_WORLD_SIZE": len(plans)}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with plans[number].everywhere(), open(root / f"said-{number}", "w") as said:
            os.dup2(said.fileno(), 2)
            train(root, way)

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=rank, args=(number,)) for number in range(len(plans))]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    timeout_s = None
    while running:
        ended = wait(list(running), timeout_s)
        for process in [running.pop(sentinel) for sentinel in ended]:
            process.join()
            timeout_s = 5.0 if process.exitcode else timeout_s
        for process in running.values() if not ended else ():  # what an agent does to those that wait for a dead rank
            process.kill()
    return [process.exitcode or 0 for process in processes]


def kill_ranks_everywhere(folder: str, way: Way, every: int) -> int:
    """Kill each rank at every so many of its operations between the saves of steps 4 and 5; then the same command.

    Returns:
        How many kills there were.
    """
    do_not_wait_for_the_disk()
    kills = 0
    for rank in range(way.ranks):
        whole = Path(folder, f"whole-{rank}")
        whole.mkdir()
        log = whole / "operations"

        class Noted(FaultPlan):
            def __call__(self, operation: str, path: Path, detail: Any = None, log: Path = log) -> None:
                with log.open("a") as file:
                    file.write(f"{operation} {path}\n")

        plans = [FaultPlan() for _ in range(way.ranks)]
        plans[rank] = Noted()
        assert start(whole, way, plans) == [0] * way.ranks, (whole / f"said-{rank}").read_text()
        expected = results_of(whole, way)
        operations = [line.split(" ", 1) for line in log.read_text().splitlines()]
        steps = [next((step for step in (4, 5) if f"step-{step:08d}" in path), 0) for _, path in operations]
        span = range(steps.index(4), steps.index(5))
        for number in span[rank::every]:
            root = Path(folder, f"{rank}-{number}")
            root.mkdir()
            where = f"rank {rank} killed at {operations[number]} ({number})"
            plans = [FaultPlan() for _ in range(way.ranks)]
            plans[rank].kill_at(number)
            assert start(root, way, plans)[rank] == -signal.SIGKILL, where
            assert lost(root, Board(root / "board-0")) is None, where
            assert start(root, way, [FaultPlan() for _ in range(way.ranks)]) == [0] * way.ranks, where
            assert results_of(root, way) == expected, where
            assert not list(root.rglob(".saving-*")), where
            shutil.rmtree(root)
            kills += 1
    return kills


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("deepspeed_stage_2", marks=pytest.mark.deepspeed)])
def test_a_sharded_training_killed_at_any_operation_of_a_rank_ends_bit_for_bit_the_same(
    strategy: str, tmp_path: Path
) -> None:
    """At a few of them; at all with INSTEP_KILL_EVERY=1, which takes a quarter of an hour."""
    every = int(os.environ.get("INSTEP_KILL_EVERY", 60))
    way = Way(strategy=strategy, epochs=1)
    (kills,) = run_ranks(kill_ranks_everywhere, 1, str(tmp_path), way, every, timeout_s=3500.0)
    print(f"{kills} kills")
    assert kills >= 2


# ---- at random instants


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the job's processes in /proc and waits for them by pidfd")
def test_a_training_killed_at_random_instants_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """With loader workers, and with saves in the background; `make soak` has both and neither too."""
    seed = int(os.environ.get("INSTEP_KILL_SEED", "20240501"))
    print(f"INSTEP_KILL_SEED={seed}")
    campaign = Campaign(tmp_path, seed, WAYS[1:3])
    campaign.run(6, print)
    assert len(campaign.kills) == 6
    assert {kill.target for kill in campaign.kills} == {"job", "rank", "agent"}


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the job's processes in /proc and waits for them by pidfd")
def test_a_training_that_keeps_only_the_best_loses_no_more_than_one_occasion_to_save(tmp_path: Path) -> None:
    """Three of twelve ways; all of them, and 40 kills, with INSTEP_KILL_EVERY=1."""
    seed = int(os.environ.get("INSTEP_KILL_SEED", "20240501"))
    print(f"INSTEP_KILL_SEED={seed}")
    whole = os.environ.get("INSTEP_KILL_EVERY") == "1"
    campaign = Campaign(tmp_path, seed, MONITORED if whole else MONITORED[::5], trains=True)
    campaign.run(40 if whole else 3, print)
    assert len(campaign.kills) == (40 if whole else 3)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the job's processes in /proc and waits for them by pidfd")
@pytest.mark.parametrize(
    "strategy, background, kills",
    [
        ("fsdp", False, 2),
        ("fsdp", True, 2),
        pytest.param("deepspeed_stage_2", True, 1, marks=pytest.mark.deepspeed),  # it takes long to start
    ],
)
def test_a_sharded_training_killed_at_random_instants_ends_bit_for_bit_the_same(
    strategy: str, background: bool, kills: int, tmp_path: Path
) -> None:
    seed = int(os.environ.get("INSTEP_KILL_SEED", "20240501"))
    print(f"INSTEP_KILL_SEED={seed}")
    campaign = Campaign(tmp_path, seed, [Way(strategy=strategy, background=background)], trains=True)
    campaign.run(kills, print)
    assert len(campaign.kills) == kills
    assert all(kill.where != PHASES[0] for kill in campaign.kills)
