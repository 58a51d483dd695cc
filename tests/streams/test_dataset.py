"""Records of many files as one data set: what comes back, in which order, and what damaged files end in."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from instep.data import StreamDataset, prepare_loader
from instep.errors import DataError, SettingError
from instep.streams.formats import Parquet
from instep.streams.order import WindowOrder
from tests.data.helpers import rank
from tests.helpers.spawn import run_ranks
from tests.streams.files import COUNTS, FORMATS, number, write_shards

ALL = list(range(sum(COUNTS)))


def visits(stream: StreamDataset, world: int, epoch: int, workers: int = 0, state: Any = None) -> list[int]:
    """Samples in the order of the run, each counted once."""
    loader: DataLoader[Any] = DataLoader(stream, 12 // world, shuffle=True, num_workers=workers)
    ranks = [prepare_loader(loader, rank=rank, world_size=world, seed=3) for rank in range(world)]
    seen: list[int] = []
    for source in ranks:
        source.set_epoch(epoch)
        if state is not None:
            source.load_state_dict(state)
    for batches in zip(*ranks, strict=True):
        for source, batch in zip(ranks, batches, strict=True):
            seen += batch.tolist()[: source.share.mine]
    return seen


@pytest.mark.parametrize("suffix", FORMATS)
def test_each_format_gives_each_record_in_one_order_on_any_ranks(suffix: str, tmp_path: Path) -> None:
    write_shards(tmp_path, suffix)
    stream = StreamDataset(tmp_path / f"*.{suffix}", number, window=9, cache=tmp_path)
    assert [stream[index] for index in range(len(stream))] == ALL
    assert stream.__getitems__([50, 3, 4, -31, 3]) == [50, 3, 4, 20, 3]
    assert pickle.loads(pickle.dumps(stream))[8] == 8
    orders = [visits(stream, world, epoch=1) for world in (1, 2, 3)]
    assert sorted(orders[0]) == ALL
    assert orders == [orders[0]] * 3
    assert orders[0] not in (ALL, visits(stream, 1, epoch=2))
    plain = DataLoader(stream, 4, shuffle=True)  # torch's own order
    assert sorted(torch.cat(list(plain)).tolist()) == ALL


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int, tmp_path: Path) -> None:
    write_shards(tmp_path, "parquet")
    stream = StreamDataset(tmp_path / "*.parquet", number, window=9, cache=tmp_path)
    assert visits(stream, 2, 0, workers) == visits(stream, 1, 0)


def test_the_order_needs_no_memory_and_any_part_is_had_at_once() -> None:
    order = WindowOrder([100_000] * 1000, 10_000, 0, "order", 0)
    part = order[77_770_000:77_780_000]
    assert len(order) == 10**8
    assert order[77_773_000:77_773_064] == part[3000:3064]
    assert sorted(part) == list(range(min(part), min(part) + 10_000)), "a window lies within one file here"
    assert all(isinstance(index, int) for index in part)


def test_lengths_are_found_once_and_kept(tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet", "arrow"):
        write_shards(tmp_path, suffix)
        options: dict[str, Any] = {"cache": tmp_path / "cache", "length": "text"}
        assert StreamDataset(tmp_path / f"*.{suffix}", **options).lengths.tolist() == [n % 7 for n in ALL]
        again = StreamDataset(tmp_path / f"*.{suffix}", **options)
        again._index.open = None  # type: ignore[assignment,method-assign]  # no file is opened
        assert again.lengths.tolist() == [n % 7 for n in ALL]
    with pytest.raises(SettingError, match=r"length='words': a record of .* has no such field"):
        print(StreamDataset(tmp_path / "*.jsonl", length="words", cache=tmp_path).lengths)


def test_compressed_and_distant_files_are_copied_once(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    (path, *_) = write_shards(tmp_path, "jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    memory = fsspec.filesystem("memory")
    memory.pipe("/data/b.jsonl", path.read_bytes())
    urls = [str(tmp_path / "a.jsonl.gz"), "memory://data/*.jsonl"]
    for _ in range(2):
        stream = StreamDataset(urls, number, cache=tmp_path / "cache")
        assert [stream[index] for index in range(26)] == [*range(13), *range(13)]
    assert len(list((tmp_path / "cache" / "copies").iterdir())) == 2
    memory.pipe("/data/b.jsonl", b"{}\n")
    (tmp_path / "cache" / "copies" / stream.shards[1].key).unlink()
    copy = pickle.loads(pickle.dumps(stream))
    with pytest.raises(DataError, match=r"data/b.jsonl cannot be fetched: it was changed"):
        copy[20]


def test_files_that_are_appended_to_the_list_are_read_from_the_next_epoch_on(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "jsonl")
    old = StreamDataset(paths[:3], number, window=9, cache=tmp_path)
    source = prepare_loader(DataLoader(old, 4, shuffle=True), seed=3)
    source.set_epoch(0)
    state = source.state_dict(6)
    whole = visits(old, 1, 0)
    grown = StreamDataset(paths, number, window=9, cache=tmp_path)
    assert visits(grown, 2, 0, state=state) == whole[24:]
    assert sorted(visits(grown, 2, 1)) == ALL
    other = StreamDataset([paths[1], paths[0], *paths[2:]], number, window=9, cache=tmp_path)
    with pytest.raises(DataError, match=r"the 4 files of the stream are not those"):
        visits(other, 1, 0, state=state)
    with pytest.raises(DataError, match=r"window=8, the epoch was begun with window=9"):
        visits(StreamDataset(paths[:3], number, window=8, cache=tmp_path), 1, 0, state=state)


def test_a_bad_record_is_named_or_left_out(tmp_path: Path) -> None:
    (path, *_) = write_shards(tmp_path, "jsonl")
    path.write_text(path.read_text().replace('"n": 5,', '"n": 5;'))
    stream = StreamDataset(path, number, cache=tmp_path)
    with pytest.raises(DataError, match=r"sample 5 \(.*000.jsonl, record 5 at byte \d+\) cannot be read: Expecting"):
        stream.__getitems__([4, 5])

    def decode(record: Any) -> int:
        return 1 // (record["n"] - 7) * 0 + record["n"]

    stream = StreamDataset(path, decode, on_bad_sample="skip", cache=tmp_path)
    with pytest.warns(UserWarning, match=r"sample 5 .* cannot be read: .* it was left out"):
        assert stream.__getitems__([4, 5, 6, 7]) == [4, 6]
    times, places = stream.left_out()
    assert times == 2
    assert [place.partition(", ")[2].split(" at ")[0] for place in places] == ["record 5", "record 7"]
    with pytest.raises(DataError, match=r"none of the 2 samples of a batch can be read"):
        stream.__getitems__([5, 7])
    loader: DataLoader[Any] = DataLoader(stream, 4, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the workers' too
        seeded = prepare_loader(DataLoader(stream, 4), seed_samples=True, limit=2)
        assert [batch.tolist() for batch in seeded] == [[0, 1, 2, 3], [4, 6]]
        with pytest.raises(DataError, match=r"none of the 1 samples"):
            list(prepare_loader(DataLoader(stream, 1), seed_samples=True))
        assert torch.cat(list(loader)).tolist() == [n for n in range(13) if n not in (5, 7)]
    assert stream.left_out()[0] == 10, "workers report too"


def _left_out(path: str) -> tuple[int, list[str]]:
    stream = StreamDataset(path, lambda record: 1 // (record["n"] % 5 > 0), on_bad_sample="skip", cache=f"{path}.cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream.__getitems__([*range(1, 8)] if rank() else [0, 1, 12])
    return stream.left_out(across_ranks=True)


@pytest.mark.dist
def test_all_ranks_know_what_each_has_left_out(tmp_path: Path) -> None:
    (path, *_) = write_shards(tmp_path, "jsonl")
    found = run_ranks(_left_out, 2, str(path))
    assert found[0] == found[1]
    assert (found[0][0], [place.partition(", ")[2].split(" at ")[0] for place in found[0][1]]) == (
        2,
        ["record 0", "record 5"],
    )


def test_what_damaged_and_hostile_files_end_in(tmp_path: Path) -> None:
    """Before training where it can be known; else at the record, never by other data."""
    paths = {suffix: write_shards(tmp_path, suffix) for suffix in FORMATS}
    cut = paths["parquet"][0]
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"000.parquet cannot be read as parquet"):
        StreamDataset(paths["parquet"], cache=tmp_path)
    cut = paths["tar"][0]
    cut.write_bytes(cut.read_bytes()[:1500])
    with pytest.raises(DataError, match=r"000.tar cannot be read as tar: truncated"):
        StreamDataset(paths["tar"], cache=tmp_path)
    with tarfile.open(tmp_path / "out.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../../etc/cron.txt"), io.BytesIO())
    with pytest.raises(DataError, match=r"'../../etc/cron.txt' is a sparse file, or its name leads out"):
        StreamDataset(tmp_path / "out.tar", cache=tmp_path)
    (tmp_path / "long.jsonl").write_text('{"n": 1}\n' + json.dumps("x" * 3000) + "\n")
    with pytest.raises(DataError, match=r"record 1 at byte 9 has 3,003 bytes, and a record may have 2,000"):
        StreamDataset(tmp_path / "long.jsonl", max_record_bytes=2000, cache=tmp_path)
    with pytest.raises(DataError, match=r"the shard .*none.jsonl cannot be read: it is missing"):
        StreamDataset([*paths["jsonl"], tmp_path / "none.jsonl"], cache=tmp_path)
    with pytest.raises(DataError, match=r"000.jsonl has 13 records, and counts= says 12"):
        StreamDataset(paths["jsonl"], counts=[12, 7, 30, 1], cache=tmp_path)[0]
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe.txt cannot be read: it is no regular file"):
        StreamDataset(tmp_path / "pipe.txt", cache=tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_damaged_group_is_decoded_once_and_its_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    (path, *_) = write_shards(tmp_path, "parquet")  # 4 groups, of 4 rows at most
    page = pq.read_metadata(path).row_group(1).column(0)
    start = page.dictionary_page_offset or page.data_page_offset
    content = path.read_bytes()
    path.write_bytes(
        content[:start] + b"\xff" * page.total_compressed_size + content[start + page.total_compressed_size :]
    )
    loaded: list[int] = []
    load = Parquet.load
    monkeypatch.setattr(Parquet, "load", lambda self, group: [loaded.append(group), load(self, group)][1])
    stream = StreamDataset(path, number, on_bad_sample="skip", cache=tmp_path / "cache")
    with pytest.warns(UserWarning, match=r"its group of rows cannot be read"):
        assert stream.__getitems__([*range(13)]) == [0, 1, 2, 3, *range(8, 13)]
    assert loaded == [0, 1, 2, 3]
    assert stream.left_out()[0] == 4
    (reader,) = stream._readers.values()
    is_gone = weakref.ref(reader)
    stream._readers.clear()
    reader.close()
    assert str(path.resolve()) not in [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    del reader
    assert is_gone() is None


def test_a_file_that_changes_during_the_run_is_an_error(tmp_path: Path) -> None:
    for suffix in FORMATS:
        path = write_shards(tmp_path, suffix)[0]
        stream = StreamDataset(path, number, cache=tmp_path)
        assert stream[3] == 3
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content + content)
        with pytest.raises(DataError, match=rf"000.{suffix} was changed during the run"):
            stream[4]


def test_a_damaged_index_is_made_anew_and_one_of_other_files_is_not_used(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, "txt")
    cache = tmp_path / "cache"

    def read() -> list[int]:
        stream = StreamDataset(paths, number, cache=cache)
        return [stream[index] for index in range(len(stream))]

    assert read() == ALL
    index = sorted((cache / "index").glob("*.npy"))
    for path in index:
        path.write_bytes(path.read_bytes()[:-9])
    assert read() == ALL
    pickled = tmp_path / "pickled"
    (index[0]).write_bytes(pickle.dumps(_Bomb(pickled)))
    assert read() == ALL
    assert not pickled.exists()
    for path in sorted((cache / "index").glob("*.json")):
        path.write_text('{"version": 1, "count": 1e99}')
    assert read() == ALL
    swapped = sorted((cache / "index").glob("*.npy"), key=lambda path: path.stat().st_size)
    starts = swapped[-1].read_bytes()
    swapped[-1].write_bytes(starts[:136] + (4).to_bytes(8, "little") + starts[144:])  # a place within a line
    with pytest.raises(DataError, match=r"the index is not of this file"):
        read()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)
