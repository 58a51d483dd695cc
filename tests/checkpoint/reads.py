"""Counting the bytes of a checkpoint that are read from the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import LocalFiles, tensors


@contextmanager
def bytes_read() -> Iterator[Counter[Path]]:
    """Bytes that this process reads of each local file; one that safetensors maps counts as read once."""
    counts: Counter[Path] = Counter()
    map_ = tensors._read_stored
    read, read_range, hash_, fetched = LocalFiles.read, LocalFiles.read_range, LocalFiles.hash, LocalFiles.fetched

    def counted_read(self: LocalFiles, path: Path, most: int) -> bytes:
        data = read(self, path, most)
        counts[path] += len(data)
        return data

    def counted_range(self: LocalFiles, path: Path, begin: int, end: int) -> bytearray:
        data = read_range(self, path, begin, end)
        counts[path] += len(data)
        return data

    def counted_hash(self: LocalFiles, path: Path) -> Any:
        counts[path] += path.stat().st_size
        return hash_(self, path)

    def counted_fetched(self: LocalFiles, path: Path, check: bool) -> Any:
        counts[path] += path.stat().st_size * check
        return fetched(self, path, check)

    def counted_map(path: Path) -> Any:
        counts[path] += path.stat().st_size
        return map_(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFiles, "read", counted_read)
        patch.setattr(LocalFiles, "read_range", counted_range)
        patch.setattr(LocalFiles, "hash", counted_hash)
        patch.setattr(LocalFiles, "fetched", counted_fetched)
        patch.setattr(tensors, "_read_stored", counted_map)
        yield counts


def times_read(counts: Counter[Path], folder: Path) -> dict[str, float]:
    """How often each file of a checkpoint was read; less the manifest, which every look at the folder reads."""
    files = [path for path in sorted(folder.iterdir()) if path.name != "manifest.json"]
    return {path.name: counts[path] / path.stat().st_size for path in files}
