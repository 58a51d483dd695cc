from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.data.sampler import ShardedBatches, ShardedBatchSampler
from instep.errors import SettingError

lengths = st.integers(0, 60)
batch_sizes = st.integers(1, 9)
worlds = st.integers(1, 5)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def ranks(
    length: int, batch_size: int, world: int, *, cursor: int = 0, epoch: int = 0, **options: Any
) -> list[ShardedBatchSampler]:
    samplers = [
        ShardedBatchSampler(length, batch_size, rank=rank, world_size=world, **{"shuffle": True, "seed": 3, **options})
        for rank in range(world)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        sampler.cursor = cursor
    return samplers


def real_samples(samplers: list[ShardedBatchSampler]) -> list[list[int]]:
    """The samples of each step over all ranks, without replays."""
    passes = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in passes}) == 1, "ranks differ in steps"
    steps = []
    for step in range(len(passes[0])):
        taken: list[int] = []
        for sampler, batches in zip(samplers, passes, strict=True):
            local, total = sampler.samples(step)
            assert batches[step], "an empty batch"
            assert len(batches[step]) == max(local, 1) <= sampler.batch_size
            assert batches[step] == sampler.indices(step)
            taken += batches[step][:local]
        assert len(taken) == total
        steps.append(taken)
    return steps


@given(lengths, batch_sizes, worlds, st.booleans(), st.integers(0, 3))
def test_each_sample_once_and_equal_steps(length: int, size: int, world: int, shuffle: bool, epoch: int) -> None:
    steps = real_samples(ranks(length, size, world, shuffle=shuffle, epoch=epoch))
    assert Counter(flat(steps)) == Counter(range(length))
    assert len(steps) == -(-length // (size * world))
    sizes = [len(step) for step in steps]
    assert all(n == size * world for n in sizes[:-1])


@given(lengths, batch_sizes, worlds, batch_sizes, worlds, st.integers(0, 60))
def test_resume_at_another_world_and_batch_size(
    length: int, size: int, world: int, new_size: int, new_world: int, stop: int
) -> None:
    before = real_samples(ranks(length, size, world))[: stop % 8]
    cursor = sum(map(len, before))
    after = real_samples(ranks(length, new_size, new_world, cursor=cursor))
    assert Counter(flat(before + after)) == Counter(range(length))


@given(lengths, st.sampled_from([(1, 12, 1), (2, 6, 1), (3, 4, 1), (2, 2, 3), (4, 1, 3), (1, 3, 4), (6, 1, 2)]))
def test_windows_hold_the_same_samples_at_every_world_size(length: int, layout: tuple[int, int, int]) -> None:
    world, size, accumulate = layout
    steps = real_samples(ranks(length, size, world))
    windows = [set(flat(steps[i : i + accumulate])) for i in range(0, len(steps), accumulate)]
    reference = [set(step) for step in real_samples(ranks(length, 12, 1))]
    assert windows == reference


@given(lengths, batch_sizes, worlds, st.integers(0, 60))
def test_drop_last_leaves_full_steps_only(length: int, size: int, world: int, cursor: int) -> None:
    cursor = min(cursor, length)
    steps = real_samples(ranks(length, size, world, cursor=cursor, drop_last=True))
    assert [len(step) for step in steps] == [size * world] * ((length - cursor) // (size * world))


@given(lengths, batch_sizes, worlds, st.integers(0, 9))
def test_limit_counts_steps_of_the_epoch(length: int, size: int, world: int, limit: int) -> None:
    whole = real_samples(ranks(length, size, world))
    limited = ranks(length, size, world)
    for sampler in limited:
        sampler.limit_steps = limit
    assert real_samples(limited) == whole[:limit]


@given(lengths, batch_sizes, worlds)
def test_even_steps_are_full(length: int, size: int, world: int) -> None:
    sampler = ranks(length, size, world)[0]
    counts = [sampler.samples(step) for step in range(len(sampler))]
    assert counts[: sampler.even_steps] == [(size, size * world)] * sampler.even_steps
    assert len(counts) - sampler.even_steps <= 1


def test_orders_depend_on_seed_epoch_and_cycle_only() -> None:
    torch.manual_seed(1)
    sampler = ShardedBatchSampler(50, 50, shuffle=True, seed=3)
    orders = {}
    for key in [(0, 0), (1, 0), (0, 1), (0, 0)]:
        sampler.set_epoch(*key)
        order = tuple(next(iter(sampler)))
        assert orders.setdefault(key, order) == order
    assert len(set(orders.values())) == 3
    assert tuple(next(iter(ShardedBatchSampler(50, 50, shuffle=True, seed=4)))) not in orders.values()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1)), "the global generator was used"


def test_many_batches_come_in_order() -> None:
    sampler = ShardedBatchSampler(5000, 2, shuffle=True, seed=0)
    assert flat(sampler) == sampler.order.tolist()  # type: ignore[union-attr]


def test_a_drawn_order_may_hold_any_keys() -> None:
    keys = [f"key{i}" for i in range(5)]
    samplers = [
        ShardedBatchSampler(0, 2, shuffle=False, seed=0, rank=rank, world_size=2, order=lambda seed, epoch, cycle: keys)
        for rank in range(2)
    ]
    assert [list(sampler) for sampler in samplers] == [[["key0", "key1"], ["key4"]], [["key2", "key3"], ["key4"]]]
    assert [sampler.samples(1) for sampler in samplers] == [(1, 1), (0, 1)]


def test_wrong_arguments_of_the_sharded_sampler_are_named() -> None:
    with pytest.raises(SettingError, match="batch_size=0"):
        ShardedBatchSampler(3, 0, shuffle=False, seed=0)
    with pytest.raises(SettingError, match="rank=2"):
        ShardedBatchSampler(3, 1, shuffle=False, seed=0, rank=2, world_size=2)


@given(st.lists(st.integers(1, 4), max_size=20), worlds, st.integers(0, 20), st.booleans())
def test_whole_batches_once_each(sizes: list[int], world: int, cursor: int, drop_last: bool) -> None:
    batches = [[(number, sample) for sample in range(size)] for number, size in enumerate(sizes)]
    cursor = min(cursor, len(batches))
    samplers = [
        ShardedBatches(lambda seed, epoch, cycle: batches, seed=0, rank=rank, world_size=world, drop_last=drop_last)
        for rank in range(world)
    ]
    for sampler in samplers:
        sampler.cursor = cursor
    passes = [list(sampler) for sampler in samplers]
    assert len({len(taken) for taken in passes}) == 1
    real = []
    for step in range(len(passes[0])):
        locals_ = [sampler.samples(step)[0] for sampler in samplers]
        assert {sampler.samples(step)[1] for sampler in samplers} == {sum(locals_)}
        real += [taken[step] for taken, local in zip(passes, locals_, strict=True) if local]
        if step < samplers[0].even_steps:
            assert len(set(locals_)) == 1
    kept = len(batches) - cursor - ((len(batches) - cursor) % world if drop_last else 0)
    assert sorted(real) == sorted(batches[cursor : cursor + kept])


def test_batches_of_unknown_size_are_counted_themselves() -> None:
    samplers = [
        ShardedBatches(lambda seed, epoch, cycle: [7, 8, 9], seed=0, rank=rank, world_size=2, single=True)
        for rank in range(2)
    ]
    assert [list(sampler) for sampler in samplers] == [[7, 9], [8, 9]]
    assert [sampler.samples(1) for sampler in samplers] == [(1, 1), (0, 1)]
    assert not samplers[0].counted
