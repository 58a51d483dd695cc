"""Real faults at each operation of a save: killed, disk full, read-only."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoint import CheckpointStore, LocalFiles, Writer, files
from instep.errors import CheckpointError
from tests.checkpoint.helpers import Log, left_over, value_of, writes
from tests.helpers.spawn import run_ranks

OLD, NEW = 1.0, 2.0


def do_not_wait_for_the_disk() -> None:
    """A killed process loses nothing that the system has; hundreds of real fsyncs would only take time."""
    files._fsync = lambda fd: None


def save_new_step(store: CheckpointStore) -> None:
    store.save(2, writes(NEW))


def save_same_step(store: CheckpointStore) -> None:
    store.save(1, writes(NEW))


def save_then_delete_the_old(store: CheckpointStore) -> None:
    path = store.save(2, writes(NEW))
    assert store.verify(path) == []
    store.delete("step-00000001-1")


ACTIONS: list[Callable[[CheckpointStore], None]] = [save_new_step, save_same_step, save_then_delete_the_old]


def operations_of(action: Callable[[CheckpointStore], None], root: Path) -> list[str]:
    CheckpointStore(root).save(1, writes(OLD))
    log = Log()
    action(CheckpointStore(root, LocalFiles(log)))
    return [operation for operation, _ in log.operations]


def killed_at(operation: int, action: Callable[[CheckpointStore], None], root: Path) -> int:
    """Run the action in a child that is killed before that operation; its exit status as os.wait has it."""
    child = os.fork()
    if child == 0:
        try:
            log = Log(operation, lambda: os.kill(os.getpid(), signal.SIGKILL))
            action(CheckpointStore(root, LocalFiles(log)))
        finally:
            os._exit(0)  # not reached: the operation is one that happens
    return os.waitpid(child, 0)[1]


def kill_everywhere(folder: str, name: str) -> dict[str, int]:
    """Kill a child at each operation; how many there were of each, once what was left passed every check."""
    do_not_wait_for_the_disk()
    (action,) = (action for action in ACTIONS if action.__name__ == name)
    operations = operations_of(action, Path(folder, "count"))
    seen: list[float] = []
    for number in range(len(operations)):
        root = Path(folder, str(number))
        store = CheckpointStore(root)
        store.save(1, writes(OLD))
        assert killed_at(number, action, root) == signal.SIGKILL
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


@pytest.mark.dist
@pytest.mark.parametrize("name", [action.__name__ for action in ACTIONS])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path: Path, name: str) -> None:
    (count,) = run_ranks(kill_everywhere, 1, str(tmp_path), name, timeout_s=100)
    assert count["create"] == count["fsync"] == 7  # 3 files, 2 of which are states in two parts, and the manifest
    assert count["write"] >= 7
    assert count["rename"] == (2 if name == "save_then_delete_the_old" else 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=["ENOSPC", "EROFS", "EDQUOT"])
def test_a_failure_of_any_operation_fails_the_save_and_nothing_else(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_fsync", lambda fd: None)
    operations = operations_of(save_new_step, tmp_path / "count")
    for number, operation in enumerate(operations):
        root = tmp_path / str(number)
        CheckpointStore(root).save(1, writes(OLD))

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        store = CheckpointStore(root, LocalFiles(Log(number, fail)))
        with pytest.raises(CheckpointError, match=os.strerror(code)) as caught:
            store.save(2, writes(NEW))
        assert str(root) in str(caught.value), operation
        if operation in ("create", "write", "fsync"):
            assert " bytes" in str(caught.value), operation
        assert sorted(path.name for path in root.iterdir()) == ["step-00000001-1"], operation
        assert value_of(store.read(store.save(2, writes(NEW)))) == NEW


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_the_disk(folder: str) -> None:
    store = CheckpointStore(folder)
    old = store.save(1, writes(OLD))

    def write(writer: Writer) -> None:
        writer.tensors("model.safetensors", {"weight": torch.zeros(1_000_000)})

    with largest_file(1_000_000), pytest.raises(CheckpointError) as caught:
        store.save(2, write)
    text = str(caught.value)
    assert "model.safetensors" in text
    assert re.search(r"after 1,000,000 of 4,000,\d+ bytes", text)
    assert "bytes are free there" in text
    assert isinstance(caught.value.__cause__, OSError)
    assert list(store.root.iterdir()) == [old]
    assert value_of(store.read(old)) == OLD
    store.save(2, write)


@pytest.mark.dist
def test_a_disk_that_fills_up_is_named_with_path_and_bytes(tmp_path: Path) -> None:
    run_ranks(fill_the_disk, 1, str(tmp_path))


def test_a_folder_that_vanishes_in_the_middle(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")

    def write(writer: Writer) -> None:
        shutil.rmtree(tmp_path / "run")
        writes(NEW)(writer)

    with pytest.raises(CheckpointError, match="has vanished"):
        store.save(1, write)
    assert value_of(store.read(store.save(1, writes(NEW)))) == NEW


def test_a_failure_of_any_operation_of_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fsync", lambda fd: None)
    log = Log()
    store = CheckpointStore(tmp_path / "count", LocalFiles(log))
    path = store.save(1, writes(OLD))
    before = len(log.operations)
    store.delete(path)
    count = len(log.operations) - before
    for number in range(count):
        store = CheckpointStore(tmp_path / str(number))
        kept, gone = store.save(2, writes(NEW)), store.save(1, writes(OLD))

        def fail() -> Any:
            raise OSError(errno.EIO, "Input/output error")

        store.files.trace = Log(number, fail)
        with pytest.raises(CheckpointError, match="could not delete"):
            store.delete(gone)
        store.files.trace = None
        assert store.resolve("last") == kept
        assert all(store.verify(found.path) == [] for found in store.scan())
        store.delete(gone)
        store.sweep()
        assert list(store.root.iterdir()) == [kept]
