"""Mixtures, windows and buckets of streams: proportions, packs and orders, and that a resume goes on with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from instep.data import PackedStream, StreamDataset, StreamMixture, prepare_loader
from instep.errors import DataError, SettingError
from tests.streams.files import number, write_shards
from tests.streams.test_dataset import visits

WEB, BOOKS = 1000, 300


def make_mixture(folder: Path, weights: Any, **settings: Any) -> StreamMixture:
    for name, counts in (("web", [400, 600]), ("books", [300])):
        (folder / name).mkdir(exist_ok=True)
        if not list((folder / name).iterdir()):
            write_shards(folder / name, "jsonl", counts)
    web = StreamDataset(folder / "web/*.jsonl", number, window=50, cache=folder, length="text")
    books = StreamDataset(folder / "books/*.jsonl", lambda record: WEB + record["n"], cache=folder, length="text")
    return StreamMixture([web, books], weights, **settings)


def test_proportions_are_exact_in_each_block_and_change_by_phase(tmp_path: Path) -> None:
    mixture = make_mixture(tmp_path, {0: [3, 1], 2048: [1, 1], 4096: [0, 1]}, size=1500)
    seen = [sample for epoch in range(4) for sample in visits(mixture, 1, epoch)]
    blocks = [seen[begin : begin + 1024] for begin in range(0, 5120, 1024)]
    assert [sum(sample >= WEB for sample in block) for block in blocks] == [256, 256, 512, 512, 1024]
    web = [sample for sample in seen if sample < WEB]
    books = [sample for sample in seen if sample >= WEB]
    for samples, length in ((web, WEB), (books, BOOKS)):
        passes = [samples[begin : begin + length] for begin in range(0, len(samples) - length + 1, length)]
        assert passes
        assert all(len(set(one)) == length for one in passes), "each once before any comes again"
    assert books[:BOOKS] != books[BOOKS : 2 * BOOKS]
    assert [visits(mixture, world, 2) for world in (2, 3)] == [visits(mixture, 1, 2)] * 2


def test_shares_of_tokens_count_by_the_mean_length(tmp_path: Path) -> None:
    mixture = StreamMixture([list(range(100)), list(range(100))], {0: [1, 1], 30_720: [1, 0]}, size=4096,
                            measure="tokens", lengths=[30, 10])  # fmt: skip
    sources = [source for source, _ in mixture._instep_order_of(True, 0, 0, 0)]
    assert Counter(sources[:2048]) == {0: 512, 1: 1536}, "15,360 tokens of each: 512 x 30 and 1,536 x 10"
    assert set(sources[2048:]) == {0}
    with pytest.raises(SettingError, match=r"measure='tokens' needs lengths="):
        StreamMixture([[1], [2]], [1, 1], measure="tokens")


def test_weights_of_later_phases_may_change_at_a_resume(tmp_path: Path) -> None:
    mixture = make_mixture(tmp_path, [3, 1], size=1100)
    source = prepare_loader(DataLoader(mixture, 12, shuffle=True), seed=3)
    source.set_epoch(1)
    state = source.state_dict(30)
    whole = visits(mixture, 1, 1)
    changed = make_mixture(tmp_path, {0: [3, 1], 3072: [1, 5]}, size=1100)
    assert visits(changed, 3, 1, state=state) == whole[360:]
    assert visits(changed, 1, 2) != visits(mixture, 1, 2)
    with pytest.raises(DataError, match=r"weights up to the end of this epoch are not those"):
        visits(make_mixture(tmp_path, {0: [3, 1], 2000: [1, 5]}, size=1100), 1, 1, state=state)


def test_packed_windows_hold_each_sequence_once_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, "parquet", [130, 70])
    stream = StreamDataset(
        tmp_path / "*.parquet", lambda row: [row["n"]] * len(row["ids"]), length="ids", cache=tmp_path
    )
    packed = PackedStream(stream, [max(1, each) for each in stream.lengths], size=7, block=30)
    sequences = sorted(each for index in range(len(packed)) for each in packed.windows[index])
    assert sequences == list(range(200))
    assert max(packed.windows[0]) < 30
    assert "000.parquet, row" in packed.describe_sample(0)
    monkeypatch.setattr(PackedStream, "__getitems__", lambda self, indices: list(indices))
    source = prepare_loader(DataLoader(packed, 4, shuffle=True), seed=3)
    whole = visits(packed, 1, 0)
    assert sorted(whole) == list(range(len(packed)))
    assert visits(packed, 2, 0, state=source.state_dict(3)) == whole[12:]


def test_a_bad_sample_is_left_out_of_a_mixture_a_window_and_a_bucket(tmp_path: Path) -> None:
    (path,) = write_shards(tmp_path, "jsonl", [40])
    path.write_text(path.read_text().replace('"n": 6,', '"n": 6;'))
    options: dict[str, Any] = {"on_bad_sample": "skip", "cache": tmp_path, "length": "ids", "bucket": 4}
    stream = StreamDataset(path, lambda record: record["ids"], **options)
    assert sorted(stream._instep_order_of(True, 0, 0, 0)) == list(range(40))
    windows = PackedStream(stream, size=8)
    options["bucket"] = 0
    mixture = StreamMixture([StreamDataset(path, number, **options), [100, 101]], [1, 1])
    with pytest.warns(UserWarning, match="it was left out"):
        assert mixture.__getitems__([(0, 6), (1, 0), (1, 1)]) == [100, 101]
    with pytest.warns(UserWarning, match="it was left out"):
        found = [windows[index]["sequence_ids"] for index in range(len(windows))]
    assert sum(int(ids.bool().sum()) for ids in found) == sum(n % 5 for n in range(40) if n != 6)
    alone = PackedStream(stream, size=8, block=1)  # each window has the sequence of its number
    assert len(alone.__getitems__([1, 6, 2])) == 2
    with pytest.raises(DataError, match=r"no sequence of a batch of windows can be read, as .*record 6"):
        alone.__getitems__([6, 6])
    with pytest.raises(DataError, match=r"none of the 1 samples of a batch can be read, such as .*record 6"):
        mixture.__getitems__([(0, 6), (0, 6)])


def test_buckets_have_sequences_of_about_the_same_length(tmp_path: Path) -> None:
    write_shards(tmp_path, "jsonl", [120, 90])
    stream = StreamDataset(tmp_path / "*.jsonl", number, window=84, length="text", bucket=12, cache=tmp_path)
    seen = visits(stream, 2, 0)
    assert sorted(seen) == list(range(210))
    groups = [seen[begin : begin + 12] for begin in range(0, 204, 12)]
    spread = [max(n % 7 for n in group) - min(n % 7 for n in group) for group in groups]
    assert max(spread[:14]) <= 1
    assert [group[0] % 7 for group in groups[:7]] != sorted(group[0] % 7 for group in groups[:7])
