"""Faults that pass by themselves: a save begins again elsewhere, at most twice; reading asks again."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import CheckpointStore, LocalFiles
from instep.checkpoint import files as retry
from instep.errors import CheckpointError, RemoteError
from instep.state import PartialState
from instep.utils import atomic
from tests.checkpoint.helpers import left_over, path_of, value_of, writes
from tests.helpers.spawn import run_ranks

AGAIN = "is tried again in another folder"


class Failing:
    """A trace that fails an operation some times, and remembers what was done to which folder."""

    def __init__(self, operation: str, times: int, code: int = errno.ESTALE) -> None:
        self.left = times
        self.seen: list[tuple[str, Path]] = []
        self._operation = operation
        self._code = code

    def __call__(self, operation: str, path: Path, detail: Any) -> None:
        self.seen.append((operation, path))
        if operation == self._operation and self.left:
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, none of which takes time."""
    made: list[float] = []
    monkeypatch.setattr(retry, "sleep", made.append)
    monkeypatch.setattr(atomic, "fsync", lambda fd: None)
    return made


@pytest.mark.parametrize("operation", ["mkdir", "create", "write", "fsync", "fsync_folder", "rename"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_save_begins_again_in_another_folder(tmp_path: Path, operation: str, times: int, pauses: list[float]) -> None:
    trace = Failing(operation, times)
    store = CheckpointStore(tmp_path, LocalFiles(trace))
    with pytest.warns(UserWarning, match=AGAIN) as caught:
        path = store.save(3, writes(1.0))
    assert len(caught) == times
    assert pauses == list(retry.PAUSES_S)[:times]
    assert value_of(store.read(path)) == 1.0
    assert store.verify(path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.name != "step-00000003-1" or operation == "mkdir"  # a folder that may be damaged is not used again
    made = [folder for what, folder in trace.seen if what == "mkdir" and folder != tmp_path]
    assert len(made) == times + 1


def test_a_failed_fsync_is_never_repeated(tmp_path: Path, pauses: list[float]) -> None:
    """The system may have dropped the pages, and a second fsync would report success."""
    trace = Failing("fsync", 2, errno.EIO)
    with pytest.warns(UserWarning, match=AGAIN):
        CheckpointStore(tmp_path, LocalFiles(trace)).save(3, writes(1.0))
    synced = [path for what, path in trace.seen if what == "fsync"]
    assert len(synced) == len(set(synced))


@pytest.mark.parametrize("operation", ["mkdir", "write", "rename"])
def test_what_does_not_pass_is_raised_at_the_third_time(tmp_path: Path, operation: str, pauses: list[float]) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, writes(1.0))
    store.files.trace = Failing(operation, 9)
    with (
        pytest.warns(UserWarning, match=AGAIN) as caught,
        pytest.raises(CheckpointError, match=re.escape(os.strerror(errno.ESTALE))),
    ):
        store.save(3, writes(2.0))
    assert len(caught) == 2
    assert len(pauses) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001-1"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOENT])
def test_what_will_not_pass_is_raised_at_once(tmp_path: Path, code: int, pauses: list[float]) -> None:
    store = CheckpointStore(tmp_path, LocalFiles(Failing("write", 1, code)))
    with pytest.raises(CheckpointError):
        store.save(3, writes(1.0))
    assert pauses == []


def test_a_users_own_error_is_raised_at_once(tmp_path: Path, pauses: list[float]) -> None:
    def write(writer: Any) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        CheckpointStore(tmp_path).save(3, write)
    assert pauses == []


@pytest.mark.parametrize("method", ["read", "size", "hash", "folders"])
def test_a_read_that_fails_once_is_tried_again(
    tmp_path: Path, method: str, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a short fault would make a run go on from an older checkpoint."""
    store = CheckpointStore(tmp_path)
    store.save(1, writes(1.0))
    newest = store.save(2, writes(2.0))
    whole: Callable[..., Any] = getattr(LocalFiles, method)
    left = [2]

    def stale(self: LocalFiles, path: Path, *args: Any) -> Any:
        if left[0] and (method == "folders" or newest in path.parents):
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return whole(self, path, *args)

    monkeypatch.setattr(LocalFiles, method, stale)
    with pytest.warns(UserWarning, match="reading failed for now"):
        assert path_of(store.resolve("last")) == newest
    assert left == [0]
    assert pauses == list(retry.PAUSES_S)


@pytest.mark.parametrize("check", [True, False])  # hashing, and then reading
def test_reading_tensors_asks_again(
    tmp_path: Path, check: bool, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    reader = store.read(store.save(1, writes(1.0)))
    fetched, left = LocalFiles.fetched, [1]

    def stale(self: LocalFiles, path: Path, asked: bool) -> Any:
        if left[0] and asked is check:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return fetched(self, path, asked)

    monkeypatch.setattr(LocalFiles, "fetched", stale)
    with pytest.warns(UserWarning, match="reading failed for now"):
        assert value_of(reader) == 1.0
    assert pauses == [retry.PAUSES_S[0]]


def fail_on(folder: str, bad: int, times: int) -> tuple[str, int, list[str], list[float]]:
    """Rank `bad` fails to write in passing; what each rank sees."""
    pauses: list[float] = []
    retry.sleep = pauses.append
    rank = PartialState(cpu=True).process_index
    atomic.fsync = lambda fd: None
    store = CheckpointStore(folder, LocalFiles(Failing("write", times if rank == bad else 0)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            path = store.save(5, writes(1.0))
            found = f"{path.name} {value_of(store.read(path))} {store.verify_together(path)}"
        except (CheckpointError, RemoteError) as error:
            found = type(error).__name__
    return found, sum(AGAIN in str(w.message) for w in caught), left_over(store), pauses


@pytest.mark.dist
@pytest.mark.parametrize("bad", [0, 1])
def test_the_ranks_begin_again_together(tmp_path: Path, bad: int) -> None:
    first, second = run_ranks(fail_on, 2, str(tmp_path), bad, 2)
    assert first == ("step-00000005-3 1.0 []", 2, [], list(retry.PAUSES_S))
    assert second == ("step-00000005-3 1.0 []", 0, [], [])


@pytest.mark.dist
def test_the_ranks_give_up_together(tmp_path: Path) -> None:
    first, second = run_ranks(fail_on, 2, str(tmp_path), 1, 9)
    assert first == ("RemoteError", 2, [], list(retry.PAUSES_S))
    assert second == ("CheckpointError", 0, [], [])
