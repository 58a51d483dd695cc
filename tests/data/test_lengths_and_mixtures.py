"""Samplers by length and by weight: what they give, and that a run over them resumes to the sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from instep.callbacks import ModelCheckpoint
from instep.data import LengthBucketBatchSampler, MixtureSampler, PackedDataset
from instep.data.lengths import pack
from instep.errors import SettingError
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, quiet

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


@given(lengths=LENGTHS, size=st.integers(1, 5), pool=st.integers(1, 4), drop=st.booleans(), shuffle=st.booleans())
def test_batches_of_a_number_of_sequences(lengths: list[int], size: int, pool: int, drop: bool, shuffle: bool) -> None:
    sampler = LengthBucketBatchSampler(lengths, size, pool=pool, drop_last=drop, shuffle=shuffle)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    small = [batch for batch in batches if len(batch) < size]
    assert small in ([], batches[-1:])
    assert not (drop and small)
    every = sorted(index for batch in batches for index in batch)
    assert len(every) == len(set(every)) == (len(lengths) // size * size if drop else len(lengths))


@given(lengths=LENGTHS, most=st.integers(20, 60))
def test_batches_of_a_number_of_tokens(lengths: list[int], most: int) -> None:
    sampler = LengthBucketBatchSampler(lengths, max_tokens=most)
    assert len(sampler) <= len(lengths)  # an estimate
    batches = list(sampler)
    assert len(sampler) == len(batches)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= most for batch in batches)


def test_settings_that_do_not_fit_together() -> None:
    with pytest.raises(SettingError, match=r"give batch_size or max_tokens"):
        LengthBucketBatchSampler([1, 2])
    with pytest.raises(SettingError, match=r"max_tokens=2, but a sequence has 3 tokens"):
        LengthBucketBatchSampler([1, 3], max_tokens=2)
    with pytest.raises(SettingError, match=r"drop_last=True leaves out"):
        LengthBucketBatchSampler([1, 3], max_tokens=4, drop_last=True)


def test_buckets_of_like_lengths_need_little_padding() -> None:
    lengths = torch.randint(1, 500, (2000,), generator=torch.Generator().manual_seed(0)).tolist()

    def padded(batches: Any) -> int:
        return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches) - sum(lengths)

    plain = torch.randperm(2000).view(-1, 16).tolist()
    assert padded(LengthBucketBatchSampler(lengths, 16)) < 0.1 * padded(plain)


@given(lengths=st.lists(st.integers(1, 12), max_size=60))
def test_windows_have_every_sequence_once(lengths: list[int]) -> None:
    windows = pack(lengths, 12)
    assert sorted(index for window in windows for index in window) == list(range(len(lengths)))
    used = [sum(lengths[index] for index in window) for window in windows]
    assert all(each <= 12 for each in used)
    assert sum(each <= 6 for each in used) <= 1, "two half-empty windows would have been one"


def test_a_packed_window_holds_whole_sequences_and_padding() -> None:
    packed = PackedDataset([[5, 6, 7], [8], [9, 9]], size=4, padding=1)
    assert {key: value.tolist() for key, value in packed[1].items()} == {
        "input_ids": [9, 9, 1, 1],
        "position_ids": [0, 1, 0, 0],
        "sequence_ids": [1, 1, 0, 0],
    }
    with pytest.raises(SettingError, match=r"sequence 1 has 5 tokens, a window 4: cut it"):
        PackedDataset([[1], [2] * 5], size=4)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    size=st.integers(16, 50),
    data=st.data(),
)
def test_a_mixture_has_its_shares_and_repeats_nothing_early(lengths: list[int], size: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10.0), min_size=len(lengths), max_size=len(lengths)))
    sampler = MixtureSampler(lengths, weights, size, seed=3)
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    seen: list[int] = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        drawn = list(sampler)
        assert drawn == list(sampler)
        seen += drawn
        for source, length in enumerate(lengths):
            mine = [index for index in seen if bounds[source] <= index < bounds[source + 1]]
            share = weights[source] / sum(weights) * len(seen)
            assert abs(len(mine) - share) <= len(lengths)
            times = Counter(mine)
            fewest = min(times.values()) if len(times) == length else 0
            assert max(times.values(), default=0) - fewest <= 1


class Noting(Toy):
    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["seen"] = len(self.seen)


def _data(kind: str) -> DataLoader[Any]:
    x = torch.arange(96.0).view(24, 4)
    data = TensorDataset(x, x.sum(1))
    if kind != "mixture":
        size: Any = {"batch_size": 2} if kind == "buckets" else {"max_tokens": 8}
        return DataLoader(data, batch_sampler=LengthBucketBatchSampler([1 + i % 7 for i in range(24)], **size, pool=3))
    both = ConcatDataset([data, data])
    return DataLoader(both, batch_size=2, sampler=MixtureSampler(both, [3, 1], 24))


def _train(kind: str, folder: str, steps: int, resume: bool) -> list[list[float]]:
    module = Noting(lr=1e-6)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(max_steps=steps, enable_checkpointing=True, callbacks=[saver], devices="auto")
    trainer.fit(module, _data(kind), ckpt_path="auto" if resume else None)
    return module.seen


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["buckets", "tokens", "mixture"])
def test_a_run_goes_on_at_another_world_size_with_what_is_left(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(7)
    whole = [row for batch in _train(kind, str(tmp_path / "whole"), 12, False) for row in batch]
    torch.manual_seed(7)
    begun = [row for batch in _train(kind, str(tmp_path / "cut"), 4, False) for row in batch]
    rest = run_ranks(_train, 2, kind, str(tmp_path / "cut"), 8, True)
    left = [row for rank in rest for batch in rank for row in batch]
    assert begun == whole[: len(begun)]
    assert Counter(begun + left) == Counter(whole)
