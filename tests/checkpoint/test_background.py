"""Saving on a thread: one at a time, counted only once verified. Whole saves: test_saver.py."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.checkpoint import CheckpointStore, LocalFiles, background
from instep.checkpoint.background import BackgroundSaver, PendingSave
from instep.distributed import gather_object
from instep.distributed.rank_zero import RankGroup
from instep.errors import CorruptCheckpointError
from instep.state import PartialState
from tests.checkpoint.helpers import flip, left_over, path_of, value_of, writes
from tests.helpers.spawn import HANG_S, run_command, run_ranks
from tests.helpers.warm import warm_python

DEADLINE_S = HANG_S


class Gate:
    """A trace at which the first write of a file waits for `open`."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, operation: str, path: Path, detail: Any) -> None:
        if operation == "create":
            self.reached.set()
            assert self.open.wait(DEADLINE_S), "nobody opened the gate"


def at(operation: str, act: Callable[[Path], None], rank: int | None = None) -> Callable[[str, Path, Any], None]:
    def trace(name: str, path: Path, detail: Any) -> None:
        if name == operation and rank in (None, RankGroup().rank_and_size()[0]):
            act(path)

    return trace


def full_disk(path: Path) -> None:
    raise OSError(errno.ENOSPC, "no space left on device", str(path))


def save(saver: BackgroundSaver, store: CheckpointStore, value: float, **options: Any) -> PendingSave:
    return saver.start(store, int(value), saver.record(writes(value)), **options)


def test_a_background_save_is_listed_once_it_is_done(tmp_path: Path) -> None:
    gate = Gate()
    store, saver = CheckpointStore(tmp_path, LocalFiles(gate)), BackgroundSaver()
    pending = save(saver, store, 1.0)
    assert gate.reached.wait(DEADLINE_S)
    assert (pending.wait(0.0), pending.path, store.scan()) == (False, None, [])
    assert not saver.wait(0.0)
    gate.open.set()
    path = pending.outcome(RankGroup())
    assert pending.path == path == store.scan()[0].path
    assert value_of(store.read(path)) == 1.0
    assert saver.buffer_bytes > 0
    saver.close()
    assert left_over(store) == []


def test_the_next_one_waits_for_the_buffers(tmp_path: Path) -> None:
    order: list[str] = []
    asked = threading.Event()

    def trace(operation: str, path: Path, detail: Any) -> None:
        if operation == "create":
            assert asked.wait(DEADLINE_S)
        order.append(operation)

    saver = BackgroundSaver()
    first = save(saver, CheckpointStore(tmp_path, LocalFiles(trace)), 1.0)

    def write(writer: Any) -> None:
        order.append("copied")
        writes(2.0)(writer)

    asked.set()
    recorder = saver.record(write)
    assert first.wait(0.0)
    assert order.index("rename") < order.index("copied")
    store = CheckpointStore(tmp_path)
    second = saver.start(store, 2, recorder).outcome(RankGroup())
    assert [value_of(store.read(path)) for path in (first.outcome(RankGroup()), second)] == [1.0, 2.0]
    saver.close()


def test_what_does_not_read_back_is_no_checkpoint(tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        for path in tmp_path.glob("step-00000002-1/model.safetensors"):
            flip(path, 300)

    store, saver = CheckpointStore(tmp_path), BackgroundSaver()
    old = save(saver, store, 1.0).outcome(RankGroup())
    pending = save(saver, CheckpointStore(tmp_path, LocalFiles(at("fsync_folder", damage))), 2.0, to_delete=[str(old)])
    with pytest.raises(CorruptCheckpointError, match=r"does not read back: model\.safetensors differs"):
        pending.outcome(RankGroup())
    assert pending.path is None
    with pytest.warns(UserWarning, match="passed over"):
        assert path_of(store.resolve("last")) == old
    saver.close()


def open_when_given_up(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Open the gate right after a saver has given up its group; whether it broke it off."""
    broken_off: list[bool] = []
    close = RankGroup.close

    def close_and_open(self: RankGroup, abort: bool = False) -> None:
        close(self, abort)
        broken_off.append(abort)
        gate.open.set()

    monkeypatch.setattr(RankGroup, "close", close_and_open)
    return broken_off


def test_a_save_that_does_not_end_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    broken_off = open_when_given_up(gate, monkeypatch)
    store, saver = CheckpointStore(tmp_path, LocalFiles(gate)), BackgroundSaver()
    pending = save(saver, store, 1.0)
    assert gate.reached.wait(DEADLINE_S)
    with pytest.warns(UserWarning, match="abandoned after 0 s"):
        saver.close(timeout_s=0)
    assert broken_off == [True]
    assert pending.wait(DEADLINE_S)


def test_an_error_that_nobody_asked_for_is_warned_of(tmp_path: Path) -> None:
    saver = BackgroundSaver()
    save(saver, CheckpointStore(tmp_path, LocalFiles(at("write", full_disk))), 1.0)
    with pytest.warns(UserWarning, match="a background save failed: .*no space left"):
        saver.close()


PROGRAM = """
import sys
from instep.checkpoint import CheckpointStore
from instep.checkpoint.background import BackgroundSaver
saver = BackgroundSaver()
saver.start(CheckpointStore(sys.argv[1]), 1, saver.record(lambda writer: writer.json("a.json", 1)))
"""


def test_a_program_that_ends_waits_for_it(tmp_path: Path) -> None:
    assert run_command([warm_python(), "-c", PROGRAM, str(tmp_path)]).returncode == 0
    store = CheckpointStore(tmp_path)
    assert store.verify(store.scan()[0].path) == []


# ---- ranks


def beside_the_training(folder: str) -> tuple[str, list[str], list[int]]:
    rank = PartialState(cpu=True).process_index
    gate = Gate()
    if rank == 0:
        gate.open.set()  # its thread goes on to where it waits for the other's
    saver = BackgroundSaver()
    pending = save(saver, CheckpointStore(folder, LocalFiles(gate)), 1.0)
    assert gate.reached.wait(DEADLINE_S)
    total = torch.tensor(rank)
    for _ in range(50):  # messages of both groups in the middle of a save
        dist.all_reduce(total)
        gather_object(rank)
    seen = gather_object(int(pending.wait(0.0)))
    gate.open.set()
    path = pending.outcome(RankGroup())
    store = CheckpointStore(folder)
    problems = store.verify_together(path)
    assert value_of(store.read(path)) == 1.0
    again = save(saver, store, 2.0, to_delete=[str(path)]).outcome(RankGroup())
    assert [info.path for info in store.scan()] == [again]
    saver.close()
    return again.name, problems, seen


@pytest.mark.dist
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_background_save_does_not_use_the_trainings_process_group(tmp_path: Path, debug: str) -> None:
    results = run_ranks(beside_the_training, 2, str(tmp_path), env={"INSTEP_DEBUG": debug})
    assert results == [("step-00000002-1", [], [0, 0])] * 2


def given_up_by(folder: str, who: int) -> str:
    rank = PartialState(cpu=True).process_index
    gate = Gate()
    saver = BackgroundSaver()
    pending = save(saver, CheckpointStore(folder, LocalFiles(gate)), 1.0)
    assert gate.reached.wait(DEADLINE_S)
    if rank == who:
        with pytest.MonkeyPatch.context() as patch:
            open_when_given_up(gate, patch)
            with pytest.warns(UserWarning, match="abandoned"):
                saver.close(timeout_s=0)
    else:
        gate.open.set()
    assert pending.wait(DEADLINE_S), "it waits for a rank that has gone"
    return type(pending.error).__name__


@pytest.mark.dist
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_has_gone_is_not_waited_for(tmp_path: Path, who: int) -> None:
    errors = run_ranks(given_up_by, 2, str(tmp_path), who)
    assert "NoneType" not in errors
    assert CheckpointStore(tmp_path).scan() == []


def given_up_by_all(folder: str) -> tuple[list[list[int]], str]:
    rank = PartialState(cpu=True).process_index
    gate = Gate()
    saver = BackgroundSaver()
    pending = save(saver, CheckpointStore(folder, LocalFiles(gate)), 1.0)
    assert gate.reached.wait(DEADLINE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "_ABORT_S", 0.0)
        with pytest.warns(UserWarning, match="abandoned"):
            saver.close(timeout_s=0)
    gather_object(rank)
    gate.open.set()
    assert pending.wait(DEADLINE_S)
    return [gather_object(10 * number + rank) for number in range(20)], type(pending.error).__name__


@pytest.mark.dist
def test_a_save_that_was_given_up_sends_nothing_to_other_ranks(tmp_path: Path) -> None:
    """Not over the group of the training either, where it would be taken for an answer to something else."""
    results = run_ranks(given_up_by_all, 2, str(tmp_path))
    assert results == [([[10 * number, 10 * number + 1] for number in range(20)], "DistributedError")] * 2
    assert CheckpointStore(tmp_path).scan() == []
