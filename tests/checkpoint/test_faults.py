"""Operations of a save that fail: disk full, read-only, vanished."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from instep.checkpoint import CheckpointStore, LocalFiles, Writer
from instep.errors import CheckpointError
from instep.utils import atomic
from tests.checkpoint.helpers import NEW, OLD, path_of, value_of, writes
from tests.helpers.faults import FaultPlan
from tests.helpers.spawn import run_ranks


def save_new_step(store: CheckpointStore) -> None:
    store.save(2, writes(NEW))


def operations_of(action: Callable[[CheckpointStore], None], root: Path) -> list[str]:
    CheckpointStore(root).save(1, writes(OLD))
    plan = FaultPlan()
    action(CheckpointStore(root, LocalFiles(plan)))
    return [operation for operation, _ in plan.operations]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT], ids=["ENOSPC", "EROFS", "EDQUOT"])
def test_a_failure_of_any_operation_fails_the_save_and_nothing_else(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "fsync", lambda fd: None)
    operations = operations_of(save_new_step, tmp_path / "count")
    for number, operation in enumerate(operations):
        root = tmp_path / str(number)
        CheckpointStore(root).save(1, writes(OLD))
        store = CheckpointStore(root, LocalFiles(FaultPlan().fail_at(number, code)))
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
    monkeypatch.setattr(atomic, "fsync", lambda fd: None)
    plan = FaultPlan()
    store = CheckpointStore(tmp_path / "count", LocalFiles(plan))
    path = store.save(1, writes(OLD))
    before = len(plan.log)
    store.delete(path)
    count = len(plan.log) - before
    for number in range(count):
        store = CheckpointStore(tmp_path / str(number))
        gone, kept = store.save(1, writes(OLD)), store.save(2, writes(NEW))
        store.files.trace = FaultPlan().fail_at(number, errno.EIO)
        with pytest.raises(CheckpointError, match="could not delete"):
            store.delete(gone)
        store.files.trace = None
        assert path_of(store.resolve("last")) == kept
        assert all(store.verify(found.path) == [] for found in store.scan())
        store.delete(gone)
        store.sweep()
        assert list(store.root.iterdir()) == [kept]
