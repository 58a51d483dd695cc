"""Saving and choosing with two real processes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import CheckpointStore, LocalFiles, Writer
from instep.checkpoint import store as store_module
from instep.errors import CheckpointError, CheckpointNotFoundError, DistributedError, RemoteError
from instep.state import PartialState
from tests.checkpoint.helpers import flip, left_over, path_of, value_of, writes
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


def join(folder: str) -> tuple[CheckpointStore, int]:
    return CheckpointStore(folder), PartialState(cpu=True).process_index


def save_twice(folder: str) -> tuple[str, str, list[str], int, list[str]]:
    store, rank = join(folder)
    first = store.save(7, writes(1.0), info={"epoch": rank})
    second = store.save(7, writes(2.0))
    assert value_of(store.read(second)) == 2.0
    assert store.read(second).state(f"rank-{rank}")["rank"] == rank
    assert store.verify_together(first) == []
    assert path_of(store.resolve("last")) == path_of(store.resolve("auto")) == second
    info = store.scan()[1].manifest
    assert info.info == {"epoch": 0}
    return first.name, second.name, sorted(info.files), info.world_size, left_over(store)


def test_all_ranks_write_into_one_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(save_twice, 2, str(tmp_path))
    assert results[0] == results[1]
    first, second, files, world_size, left = results[0]
    assert (first, second) == ("step-00000007-1", "step-00000007-2")
    assert [name for name in files if name.startswith("rank-")] == [
        "rank-0.json",
        "rank-0.safetensors",
        "rank-1.json",
        "rank-1.safetensors",
    ]
    assert world_size == 2
    assert left == []


def fail_on(folder: str, bad: int) -> tuple[str, str, list[str], str]:
    store, rank = join(folder)
    store.save(1, writes(1.0))

    def write(writer: Writer) -> None:
        writes(2.0)(writer)
        if rank == bad:
            raise ValueError(f"rank {rank} cannot")

    try:
        store.save(2, write)
    except (ValueError, RemoteError) as error:
        there = sorted(path.name for path in store.root.iterdir())
        PartialState().wait_for_everyone()  # the next save writes there again
        again = store.save(2, writes(3.0))  # the ranks are still in step
        assert value_of(store.read(again)) == 3.0
        return type(error).__name__, str(error), there, verify_with_an_error(store, again, rank == bad)
    raise AssertionError("the save must fail on every rank")


def verify_with_an_error(store: CheckpointStore, path: Path, here: bool) -> str:
    def unreadable(*_: Any) -> None:
        raise ValueError("cannot read")

    if here:
        store_module.file_problem = unreadable
    try:
        store.verify_together(path)
    except (ValueError, RemoteError) as error:
        return type(error).__name__
    raise AssertionError("the verification must fail on every rank")


@pytest.mark.parametrize("bad", [0, 1])
def test_an_exception_on_one_rank_fails_the_save_on_all(tmp_path: Path, bad: int) -> None:
    results = run_ranks(fail_on, 2, str(tmp_path), bad)
    assert results[bad][:2] == ("ValueError", f"rank {bad} cannot")
    assert [verified for *_, verified in results] == [results[0][0], results[1][0]]
    name, text, *_ = results[1 - bad]
    assert name == "RemoteError"
    assert f"ValueError: rank {bad} cannot" in text
    assert "step-00000002-1" in text
    assert [there for _, _, there, _ in results] == [["step-00000001-1"]] * 2


def commit_fails(folder: str) -> str:
    store, rank = join(folder)

    def trace(operation: str, path: Path, detail: Any) -> None:
        if operation == "rename":
            raise OSError(errno.EIO, "Input/output error")

    try:
        CheckpointStore(folder, LocalFiles(trace)).save(1, writes(1.0))
    except (CheckpointError, RemoteError) as error:
        assert store.scan() == []
        return type(error).__name__
    raise AssertionError("the save must fail on every rank")


def test_a_failed_commit_is_known_on_all(tmp_path: Path) -> None:
    assert run_ranks(commit_fails, 2, str(tmp_path)) == ["CheckpointError", "RemoteError"]


def cannot_start(folder: str) -> str:
    store, _ = join(folder)
    try:
        store.save(1, writes(1.0))
    except (CheckpointError, RemoteError) as error:
        return type(error).__name__
    raise AssertionError("the save must fail on every rank")


def test_a_folder_that_cannot_be_made_is_known_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run_ranks(cannot_start, 2, str(tmp_path / "file" / "x")) == ["CheckpointError", "RemoteError"]


def different_steps(folder: str) -> str:
    store, rank = join(folder)
    try:
        store.save(10 + rank, writes(1.0))
    except (DistributedError, RemoteError) as error:
        assert store.scan() == []
        assert left_over(store) == []
        return str(error)
    raise AssertionError("ranks at different steps must not save")


def test_ranks_at_different_steps_do_not_save(tmp_path: Path) -> None:
    for text in run_ranks(different_steps, 2, str(tmp_path)):
        assert "rank 0: 10, rank 1: 11" in text


def same_name(folder: str) -> str:
    store, _ = join(folder)
    try:
        store.save(1, lambda writer: writer.json("same.json", 1))
    except (CheckpointError, RemoteError) as error:
        return str(error)
    raise AssertionError("two ranks must not write one file")


def test_two_ranks_with_one_file_name(tmp_path: Path) -> None:
    assert all("same.json was written twice" in text for text in run_ranks(same_name, 2, str(tmp_path)))


def own_disk(folder: str) -> str:
    """Each rank sees a folder of its own under the same path, as on nodes without a shared file system."""
    store, rank = join(folder)

    def write(writer: Writer) -> None:
        if rank == 1:
            writer.folder = Path(folder, "of-rank-1")
            writer.folder.mkdir()
        writer.json(f"rank-{rank}.json", 1)

    try:
        store.save(1, write)
    except (CheckpointError, RemoteError) as error:
        assert store.scan() == []
        return str(error)
    raise AssertionError("a checkpoint without a file must not be committed")


def test_disks_that_are_not_shared_are_found_out(tmp_path: Path) -> None:
    for text in run_ranks(own_disk, 2, str(tmp_path)):
        assert "rank 1 wrote rank-1.json" in text
        assert "put the checkpoints on a shared one" in text


def damaged(folder: str, name: str) -> tuple[str, list[str], list[str]]:
    import warnings

    store, rank = join(folder)
    store.save(1, writes(1.0))
    newer = store.save(2, writes(2.0))
    state = PartialState()
    state.wait_for_everyone()
    if rank == 0:
        flip(newer / name, -4)
    state.wait_for_everyone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = store.resolve("auto")
    assert chosen is not None
    return chosen.path.name, store.verify_together(newer), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("name", ["model.safetensors", "rank-1.safetensors", "trainer.json", "manifest.json"])
def test_the_verdict_is_the_same_on_every_rank(tmp_path: Path, name: str) -> None:
    (one, problems, warned), (other, other_problems, not_warned) = run_ranks(damaged, 2, str(tmp_path), name)
    assert one == other == "step-00000001-1"
    assert problems == other_problems
    assert len(problems) == 1
    assert name in problems[0]
    assert len(warned) == 1
    assert name in warned[0]
    assert not_warned == []


def decide_alike(folder: str) -> tuple[str | None, list[str]]:
    """Rank 1's disk shows something else; what counts is what rank 0 sees."""
    store, rank = join(folder)
    path = store.save(1, writes(1.0), info={"monitor": "loss", "mode": "min", "score": 1.0})
    if rank == 1:
        store.root = Path(folder, "nothing-here")
    assert path_of(store.resolve("best")) == path_of(store.resolve("last")) == path
    removed = store.sweep()
    if rank == 1:
        store.root = path.parent
    store.delete(path)
    try:
        store.resolve("last")
    except CheckpointNotFoundError as error:
        return type(error).__name__, [str(gone) for gone in removed]
    return None, []


def test_rank_zero_decides_what_is_resolved_for_all(tmp_path: Path) -> None:
    assert run_ranks(decide_alike, 2, str(tmp_path)) == [("CheckpointNotFoundError", [])] * 2
