from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from instep.checkpoint import files, hashing
from instep.checkpoint import hashing as out_file
from instep.checkpoint.files import LocalFiles
from instep.checkpoint.hashing import FileRecord, Hasher, hash_file
from instep.errors import CheckpointError


def test_a_small_file_has_the_plain_checksum(tmp_path: Path) -> None:
    record = LocalFiles().write_file(tmp_path / "x", b"hello")
    assert record == FileRecord(5, xxhash.xxh3_128(b"hello").hexdigest())
    assert (tmp_path / "x").read_bytes() == b"hello"
    assert hash_file(tmp_path / "x") == record


def test_an_empty_file_has_a_hash(tmp_path: Path) -> None:
    assert LocalFiles().write_file(tmp_path / "x", b"") == hash_file(tmp_path / "x")


@pytest.mark.parametrize("size", [15, 16, 17, 32, 100])
@pytest.mark.parametrize("piece", [1, 5, 16, 1000])
def test_chunks_do_not_depend_on_the_pieces(size: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 16)
    data = os.urandom(size)
    hasher = Hasher()
    for start in range(0, size, piece):
        hasher.update(data[start : start + piece])
    record = hasher.record()
    digests = [xxhash.xxh3_128(data[start : start + 16]) for start in range(0, size, 16)]
    assert record.bytes == size
    if size <= 16:
        assert record == FileRecord(size, digests[0].hexdigest())
    else:
        assert record.chunks == tuple(d.hexdigest() for d in digests)
        assert record.xxh3 == xxhash.xxh3_128(b"".join(d.digest() for d in digests)).hexdigest()


def test_small_writes_are_joined_and_large_ones_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_file, "_BUFFER_BYTES", 10)
    monkeypatch.setattr(out_file, "_WRITE_BYTES", 8)
    sizes: list[int] = []

    def trace(operation: str, path: Path, detail: Any) -> None:
        if operation == "write":
            sizes.append(len(detail))

    with LocalFiles(trace).create(tmp_path / "x") as out:
        for data in (b"abc", b"def", b"0123456789ABCDEF!", b"g"):
            out.write(data)
        record = out.close()
    assert (tmp_path / "x").read_bytes() == b"abcdef0123456789ABCDEF!g"
    assert sizes == [6, 8, 8, 1, 1]
    assert record == hash_file(tmp_path / "x")


def test_short_writes_of_the_system_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: write(fd, data[:3]))
    record = LocalFiles().write_file(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"
    assert record == hash_file(tmp_path / "x")


def test_an_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="written twice"):
        LocalFiles().write_file(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_vanished_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone/x.*has vanished"):
        LocalFiles().write_file(tmp_path / "gone" / "x", b"new")


def test_missing_parents_are_made_and_synced(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []
    local = LocalFiles(lambda operation, path, detail: log.append((operation, path.name)))
    local.make_root(tmp_path / "a" / "b")
    local.make_root(tmp_path / "a" / "b")
    assert log == [("mkdir", "a"), ("fsync_folder", tmp_path.name), ("mkdir", "b"), ("fsync_folder", "a")]


def test_a_tree_is_removed_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "file").write_text("x")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    LocalFiles().remove_tree(tmp_path / "tree")
    LocalFiles().remove_tree(tmp_path / "tree")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()
