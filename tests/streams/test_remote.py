"""Files of a distant file system that fails, is slow, ends too early, or is gone."""

from __future__ import annotations

import errno
import io
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

from instep.data import StreamDataset
from instep.errors import DataError
from instep.streams import shards
from tests.streams.files import COUNTS, number, write_shards

aiohttp = pytest.importorskip("aiohttp")
fsspec = pytest.importorskip("fsspec")


class File(io.BytesIO):
    """Gives few bytes at a time; may end or fail at a place."""

    def __init__(self, content: bytes, end: int | None, fails: bool) -> None:
        super().__init__(content[:end])
        self._fails = fails

    def read(self, size: int | None = -1) -> bytes:
        some = super().read(min(size, 100) if size and size >= 2**20 else size)
        if self._fails and not some:
            raise aiohttp.ClientPayloadError("the line is dead")  # no OSError
        return some


class FullDisk(io.RawIOBase):
    """File that cannot be written."""

    def __init__(self, *_: Any) -> None: ...

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Distant(fsspec.AbstractFileSystem):
    """Files in memory, with faults that are counted down."""

    protocol = "distant"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    faults: ClassVar[Counter[str]] = Counter()
    calls: ClassVar[Counter[str]] = Counter()

    def _is_to(self, what: str) -> bool:
        self.calls[what] += 1
        self.faults[what] -= self.faults[what] > 0
        return self.faults[what] > 0

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path not in self.files:
            raise FileNotFoundError(path)
        if self._is_to("info"):
            raise aiohttp.ServerDisconnectedError("too many requests")
        return {"name": path, "size": len(self.files[path]), "type": "file", "ETag": "one"}

    def glob(self, path: str, *_: Any, **__: Any) -> list[str]:
        if self._is_to("glob"):
            raise TimeoutError("no answer")
        return [name for name in self.files if name.endswith(path.rpartition("*")[2])]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if self._is_to("open"):
            raise OSError("connection reset")
        fails, ends = self._is_to("read"), self._is_to("end")
        return File(self.files[path], 300 if fails or ends else None, fails)


pytestmark = pytest.mark.filterwarnings("ignore:reading failed for now")


@pytest.fixture(autouse=True)
def distant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("distant", Distant, clobber=True)
    monkeypatch.setattr("instep.checkpoint.files.sleep", lambda seconds: None)
    monkeypatch.setattr(Distant, "faults", Counter())
    monkeypatch.setattr(Distant, "calls", Counter())
    paths = [path for suffix in ("jsonl", "parquet") for path in write_shards(tmp_path, suffix)]
    monkeypatch.setattr(Distant, "files", {path.name: path.read_bytes() for path in paths})


def read(suffix: str, cache: Path) -> list[int]:
    stream = StreamDataset(f"distant://*.{suffix}", number, cache=cache)
    return stream.__getitems__(range(len(stream)))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("what", ["info", "glob", "open", "read", "end"])
def test_what_fails_twice_is_tried_a_third_time(what: str, suffix: str, tmp_path: Path) -> None:
    Distant.faults[what] = 3  # which is two faults: it is counted down first
    assert read(suffix, tmp_path / "cache") == [*range(sum(COUNTS))]
    assert Distant.calls[what] >= 3
    assert not Distant.faults[what]


def test_what_goes_on_failing_is_an_error_with_file_and_place(tmp_path: Path) -> None:
    size = len(Distant.files["000.jsonl"])
    for what, text in {
        "read": r"distant://000.jsonl cannot be fetched: reading failed at byte 300: the line is dead",
        "end": rf"distant://000.jsonl cannot be fetched: reading ended at byte 300 of {size:,}",
        "open": r"distant://000.jsonl cannot be fetched: reading failed at byte 0: connection reset",
        "glob": r"the files of distant://\*.jsonl cannot be listed: no answer",
        "info": r"distant://000.jsonl cannot be read: too many requests",
    }.items():
        Distant.faults = Counter({what: 1000})
        with pytest.raises(DataError, match=text):
            StreamDataset("distant://*.jsonl" if what == "glob" else "distant://000.jsonl", cache=tmp_path / what)
        assert Distant.calls[what] >= 3
        assert not list((tmp_path / what).glob("copies/[!.]*")), "no part of a file is taken for it"


def test_a_full_disk_of_this_machine_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "open", FullDisk, raising=False)
    with pytest.raises(
        DataError, match=r"000.jsonl cannot be fetched: its copy in .*copies cannot be written: .*No space left"
    ):
        StreamDataset("distant://000.jsonl", cache=tmp_path / "cache")
    assert Distant.calls["open"] == 1


def test_a_file_that_goes_away_after_it_was_counted_is_an_error_and_no_bad_sample(tmp_path: Path) -> None:
    stream = StreamDataset("distant://*.parquet", number, on_bad_sample="skip", cache=tmp_path / "cache")
    del Distant.files["002.parquet"]
    assert stream.__getitems__([0, 15]) == [0, 15]
    with pytest.raises(DataError, match=r"distant://002.parquet cannot be fetched: .* is missing"):
        stream.__getitems__([1, 25])
    assert stream.left_out() == (0, [])
