from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from instep.data import PreparedLoader, prepare_loader
from instep.data.index import IndexLoader
from instep.data.plan import gradient_correction, rank_weight, window_scale
from instep.errors import DataError, SettingError
from tests.data.helpers import Numbers


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are played one after the other here: each hears itself only."""
    monkeypatch.setattr("instep.data.loader.gather_object", lambda obj: [obj])
    monkeypatch.setattr("instep.data.index.gather_object", lambda obj: [obj])


class Noisy(Numbers):
    """Draws from all three generators for each sample."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def flat(batches: list[Any]) -> list[int]:
    return list(chain.from_iterable(batch.tolist() for batch in batches))


def sources(make: Any, world: int, **options: Any) -> list[PreparedLoader]:
    return [prepare_loader(make(), rank=rank, world_size=world, seed=5, **options) for rank in range(world)]


def real(ranks: list[PreparedLoader]) -> list[int]:
    """One pass over all ranks: the samples that count; is_last and the numbers are checked on the way."""
    taken: list[int] = []
    lengths = set()
    for source in ranks:
        number = source.first_batch
        for number, batch in enumerate(source, source.first_batch):
            local, total = source.share[:2]
            assert local is not None
            assert total is not None
            assert batch.tolist() == source.sample_indices(number)
            assert source.share.last == (number + 1 == source.num_batches)
            taken += batch.tolist()[:local]
        lengths.add(number)
    assert len(lengths) == 1
    return taken


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 7, 12, 25])
def test_plain_loader_gives_each_sample_once(shuffle: bool, world: int, length: int) -> None:
    ranks = sources(lambda: DataLoader(Numbers(length), batch_size=4, shuffle=shuffle), world)
    orders = []
    for epoch in range(3):
        for source in ranks:
            source.set_epoch(epoch)
        orders.append(tuple(real(ranks)))
        assert sorted(orders[-1]) == list(range(length))
    if length > 6:
        assert (len(set(orders)) == 3) is shuffle


def test_iterating_twice_without_set_epoch_repeats() -> None:
    source = prepare_loader(DataLoader(Numbers(9), batch_size=2, shuffle=True))
    assert flat(list(source)) == flat(list(source))
    assert len(source) == 5


def test_breaking_off_and_iterating_again_starts_anew() -> None:
    source = prepare_loader(DataLoader(Numbers(9), batch_size=2))
    for _ in source:
        break
    assert flat(list(source)) == list(range(9))


def test_the_training_generators_are_left_alone() -> None:
    for workers in (0, 1):
        source = prepare_loader(DataLoader(Numbers(9), batch_size=2, shuffle=True, num_workers=workers))
        before = torch.get_rng_state(), random.getstate()
        list(source)
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()


def test_global_generator_state_does_not_change_the_order() -> None:
    source = prepare_loader(DataLoader(Numbers(30), batch_size=4, shuffle=True))
    first = flat(list(source))
    torch.manual_seed(99)
    assert flat(list(source)) == first


def test_a_generator_of_the_user_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        loader = DataLoader(Numbers(30), shuffle=True, generator=torch.Generator().manual_seed(seed))
        return flat(list(prepare_loader(loader)))

    assert order(1) == order(1) != order(2)


@settings(max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9)
)
def test_resume_in_mid_epoch_at_another_layout(
    length: int, size: int, world: int, new_size: int, new_world: int, stop: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instep.data.loader.gather_object", lambda obj: [obj])
        ranks = sources(lambda: DataLoader(Numbers(length), batch_size=size, shuffle=True), world)
        resumed = sources(lambda: DataLoader(Numbers(length), batch_size=new_size, shuffle=True), new_world)
    stop = min(stop, len(ranks[0]))
    taken: list[int] = []
    for source in ranks:
        source.set_epoch(2)
        for _number, batch in zip(range(stop), source, strict=False):
            taken += batch.tolist()[: source.share.mine]
    states = [source.state_dict(stop) for source in ranks]
    assert all(state == states[0] for state in states)
    for source in resumed:
        source.load_state_dict(states[0])
        source.set_epoch(2)
        assert source.first_batch <= len(source)
    assert sorted(taken + real(resumed)) == list(range(length))
    for source in resumed:
        source.set_epoch(3)
    for source in ranks:
        source.set_epoch(3)
    assert sorted(real(resumed)) == list(range(length))
    if (new_size, new_world) == (size, world):
        assert real(resumed) == real(ranks)


def test_resume_takes_the_seed_of_the_checkpoint() -> None:
    source = prepare_loader(DataLoader(Numbers(20), batch_size=4, shuffle=True), seed=1)
    source.set_epoch(1)
    whole = flat(list(source))
    resumed = prepare_loader(DataLoader(Numbers(20), batch_size=4, shuffle=True), seed=2)
    resumed.load_state_dict(source.state_dict(2))
    assert flat(list(resumed)) == whole[8:]


def test_resume_at_the_end_gives_nothing_and_then_the_next_epoch() -> None:
    def make() -> PreparedLoader:
        return prepare_loader(DataLoader(Numbers(10), batch_size=4, shuffle=True), limit=2)

    source = make()
    list(source)
    state = source.state_dict(2)
    assert state["finished"]
    resumed = make()
    resumed.load_state_dict(state)
    assert (resumed.first_batch, resumed.num_batches) == (2, 2)
    assert resumed.state_dict(2)["finished"]
    assert resumed.plan.share_of(2)[:2] == (0, 0)
    assert list(resumed) == []
    resumed.set_epoch(1)
    source.set_epoch(1)
    assert flat(list(resumed)) == flat(list(source))


def test_resume_twice_in_one_epoch() -> None:
    def make() -> PreparedLoader:
        return prepare_loader(DataLoader(Numbers(23), batch_size=2, shuffle=True))

    source = make()
    whole = flat(list(source))
    second = make()
    second.load_state_dict(source.state_dict(3))
    iterator = iter(second)
    middle = flat([next(iterator) for _ in range(4)])
    third = make()
    third.load_state_dict(second.state_dict(7))
    assert third.first_batch == 7
    assert whole[:6] + middle + flat(list(third)) == whole


def test_start_at_begins_after_so_many_batches() -> None:
    source = prepare_loader(DataLoader(Numbers(10), batch_size=3))
    source.set_epoch(4)
    source.start_at(2)
    source.set_epoch(4)
    assert [batch.tolist() for batch in source] == [[6, 7, 8], [9]]
    assert flat(list(source)) == list(range(10))


def test_resume_with_other_data_is_refused() -> None:
    state = prepare_loader(DataLoader(Numbers(10), batch_size=2, shuffle=True)).state_dict(2)
    with pytest.raises(DataError, match="has 12 samples"):
        prepare_loader(DataLoader(Numbers(12), batch_size=2, shuffle=True)).load_state_dict(state)
    with pytest.raises(DataError, match="shuffle=False"):
        prepare_loader(DataLoader(Numbers(10), batch_size=2)).load_state_dict(state)
    with pytest.raises(DataError, match="another kind"):
        prepare_loader([1, 2]).load_state_dict(state)
    with pytest.raises(DataError, match="another kind"):
        prepare_loader(DataLoader(Numbers(10), batch_sampler=[[1], [2]])).load_state_dict(state)


# ---- weights


@settings(max_examples=80)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 6), st.booleans())
def test_window_scale_makes_the_mean_over_the_window(
    length: int, size: int, world: int, accumulate: int, start: int, drop_last: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instep.data.loader.gather_object", lambda obj: [obj])
        ranks = sources(lambda: DataLoader(Numbers(length), batch_size=size, drop_last=drop_last), world)
    steps = len(ranks[0])
    for source in ranks:
        source.start_at(min(start, steps))
    values = np.random.default_rng(0).normal(size=length)
    updates: dict[int, float] = {}
    samples: dict[int, list[int]] = {}
    for source in ranks:
        for number, batch in enumerate(source, source.first_batch):
            scale = window_scale(source, number, accumulate)
            if number < source.plan.full_batches(accumulate):
                assert scale == 1 / accumulate
            if source.plan.uniform:
                assert rank_weight(source) == 1.0
            assert gradient_correction(source, number, accumulate) == 1.0
            loss = values[batch.numpy()].mean() * scale
            updates[number // accumulate] = updates.get(number // accumulate, 0.0) + loss / world
            samples.setdefault(number // accumulate, []).extend(batch.tolist()[: source.share.mine])
    for window, update in updates.items():
        assert update == pytest.approx(values[samples[window]].mean(), abs=1e-12)


def test_uniform_only_without_a_tail() -> None:
    assert prepare_loader(DataLoader(Numbers(8), batch_size=4)).plan.uniform
    assert not prepare_loader(DataLoader(Numbers(9), batch_size=4)).plan.uniform
    assert prepare_loader(DataLoader(Numbers(9), batch_size=4, drop_last=True)).plan.uniform
    assert prepare_loader(DataLoader(Numbers(9), batch_size=4), limit=2).plan.uniform


# ---- limits and other settings


def test_limit_counts_steps_per_rank() -> None:
    ranks = sources(lambda: DataLoader(Numbers(20), batch_size=2), 2, limit=3)
    assert [len(source) for source in ranks] == [3, 3]
    assert sorted(real(ranks)) == list(range(12))
    assert len(prepare_loader(DataLoader(Numbers(20), batch_size=2), limit=0.5)) == 5
    assert list(prepare_loader(DataLoader(Numbers(20)), limit=0)) == []
    with pytest.raises(SettingError, match=r"limit_val_batches=0\.01"):
        prepare_loader(DataLoader(Numbers(20)), limit=0.01, stage="val")


def test_shuffle_not_allowed_takes_the_data_in_sequence() -> None:
    source = prepare_loader(DataLoader(Numbers(9), batch_size=2, shuffle=True), shuffle_allowed=False)
    source.set_epoch(3)
    assert flat(list(source)) == list(range(9))
    drawn = prepare_loader(
        DataLoader(Numbers(9), sampler=RandomSampler(Numbers(9), replacement=True)), shuffle_allowed=False
    )
    orders = []
    for epoch in range(2):
        drawn.set_epoch(epoch)
        orders.append(flat(list(drawn)))
    assert orders[0] == orders[1]


def test_batch_size_can_be_overridden_where_instep_makes_the_batches() -> None:
    assert len(prepare_loader(DataLoader(Numbers(9), batch_size=2), batch_size=3)) == 3
    with pytest.raises(SettingError, match="batch_size=3 cannot be had"):
        prepare_loader(DataLoader(Numbers(9), batch_sampler=[[1], [2]]), batch_size=3)
    with pytest.raises(SettingError, match="batch_size=3 cannot be had"):
        prepare_loader([1, 2, 3], batch_size=3)


def test_a_data_set_with_getitems_and_own_collate() -> None:
    class Many(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [index * 10 for index in indices]

    source = prepare_loader(DataLoader(Many(5), batch_size=2, collate_fn=tuple))
    assert list(source) == [(0, 10), (20, 30), (40,)]


def test_a_loader_that_does_not_batch() -> None:
    ranks = sources(lambda: DataLoader(Numbers(3), batch_size=None, shuffle=True), 2)
    passes = [list(source) for source in ranks]
    assert sorted(passes[0] + passes[1][:1]) == [0, 1, 2]
    assert ranks[1].plan.share_of(1)[:2] == (0, None)
    assert ranks[0].plan.share_of(1)[:2] == (None, None)
    assert [rank_weight(source) for source in ranks] == [2.0, 0.0]
    assert ranks[0].sample_indices(0) == passes[0][:1]
    workers = prepare_loader(DataLoader(Numbers(3), batch_size=None, num_workers=1), seed_samples=True)
    assert list(workers) == [0, 1, 2]


# ---- samplers of others


class EpochSampler(Sampler[int]):
    """Shuffles by the global generators and the epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        if random.random() + np.random.rand() + torch.rand(()).item() > 1.5:
            order.reverse()
        return iter([self.epoch * 100 + index for index in order])


class Wide(Numbers):
    pass


def test_a_foreign_sampler_is_drawn_alike_and_sharded() -> None:
    ranks = sources(lambda: DataLoader(Wide(1000), batch_size=3, sampler=EpochSampler(11)), 2)
    orders = []
    for epoch in (0, 1):
        for source in ranks:
            source.set_epoch(epoch)
            torch.rand(source.rank + 1)  # ranks differ in their own random numbers
        orders.append(real(ranks))
        assert sorted(orders[-1]) == [epoch * 100 + index for index in range(11)]
    assert [index % 100 for index in orders[0]] != [index % 100 for index in orders[1]]
    state = ranks[0].state_dict(1)
    resumed = prepare_loader(DataLoader(Wide(1000), batch_size=3, sampler=EpochSampler(11)), seed=9)
    resumed.load_state_dict(state)
    assert sorted(real([resumed])) == sorted(set(orders[1]) - set(ranks[0].sampler.order[:6].tolist()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("batch_size", [3, None])
def test_the_runs_seed_decides_what_a_foreign_sampler_draws(batch_size: int | None) -> None:
    def order(seed: int) -> list[int]:
        loader = DataLoader(Wide(1000), batch_size=batch_size, sampler=EpochSampler(11))
        return list(map(int, prepare_loader(loader, seed=seed).sampler.order))  # type: ignore[attr-defined]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_sampler_is_spread_by_whole_batches(world: int) -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(30), batch_sampler=[[1, 2], [3], [4, 5, 6], [7], [8, 9]])

    ranks = sources(make, world)
    assert sorted(real(ranks)) == list(range(1, 10))
    assert not ranks[0].plan.uniform
    assert ranks[0].plan.full_batches(1) == (0 if world == 2 else 1)
    resumed = sources(make, world)
    for source in resumed:
        source.load_state_dict(ranks[0].state_dict(1))
    assert sorted(real(resumed)) == list(range(3 if world == 1 else 4, 10))


def test_past_the_end_there_is_nothing() -> None:
    for make in (
        lambda: DataLoader(Numbers(7), batch_size=2),
        lambda: DataLoader(Numbers(7), batch_sampler=[[0], [1]]),
    ):
        source = prepare_loader(make(), limit=1)
        assert [source.plan.share_of(number)[:2] for number in (1, 2, 9)] == [(0, 0)] * 3
        source.start_at(9)
        assert list(source) == []
        assert (source.first_batch, source.num_batches) == (1, 1)


def test_batches_of_many_sizes_weigh_by_their_samples() -> None:
    batches = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]
    ranks = sources(lambda: DataLoader(Numbers(9), batch_sampler=batches), 2)
    values = [0.0] * 2
    for source in ranks:
        for number, batch in enumerate(source):
            values[number // 2] += batch.double().mean().item() * window_scale(source, number, 2) / 2
    assert values == pytest.approx([sum(range(7)) / 7, 7.5])


def test_a_distributed_sampler_is_never_sharded_twice() -> None:
    def make(rank: int, world: int, size: int = 2) -> DataLoader[int]:
        sampler = DistributedSampler(Numbers(11), num_replicas=world, rank=rank, shuffle=True, seed=3)
        return DataLoader(Numbers(11), batch_size=size, sampler=sampler)

    for epoch in range(2):
        seen: list[int] = []
        for rank in range(2):
            source = prepare_loader(make(rank, 2), rank=rank, world_size=2)
            source.set_epoch(epoch)
            plain = make(rank, 2)
            plain.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            mine = flat(list(source))
            assert mine == flat(list(plain))
            assert source.plan.share_of(0)[:2] == (2, 4)
            seen += mine
        assert set(seen) == set(range(11))
    source = prepare_loader(make(0, 2), rank=0, world_size=2)
    resumed = prepare_loader(make(0, 4, 1), rank=0, world_size=4)
    resumed.load_state_dict(source.state_dict(2))
    assert resumed.first_batch == 2
    with pytest.raises(DataError, match="no whole number of steps"):
        prepare_loader(make(0, 3), rank=0, world_size=3).load_state_dict(source.state_dict(2))


def test_use_distributed_sampler_false_leaves_the_data_whole() -> None:
    ranks = sources(lambda: DataLoader(Numbers(6), batch_size=2), 2, use_distributed_sampler=False)
    assert [flat(list(source)) for source in ranks] == [list(range(6))] * 2
    assert ranks[0].plan.share_of(2)[:2] == (2, 4)
    assert ranks[0].plan.uniform
    three = sources(lambda: DataLoader(Numbers(6), batch_size=2), 3, use_distributed_sampler=False)
    with pytest.raises(DataError, match="2 processes"):
        three[0].load_state_dict(ranks[0].state_dict(1))


def test_a_stateful_sampler_resumes_by_its_own_state() -> None:
    class Resumable(Sampler[int]):
        """Each pass continues a chain of random numbers."""

        def __init__(self) -> None:
            self.chain = 1

        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[int]:
            for _ in range(8):
                self.chain = self.chain * 37 % 101
                yield self.chain

        def state_dict(self) -> dict[str, Any]:
            return {"chain": self.chain}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.chain = state["chain"]

    def make() -> PreparedLoader:
        return prepare_loader(DataLoader(Numbers(200), batch_size=2, sampler=Resumable()))

    source = make()
    first = flat(list(source))
    source.set_epoch(1)
    iterator = iter(source)
    started = flat([next(iterator) for _ in range(2)])
    state = source.state_dict(2)
    rest = flat(list(iterator))
    source.set_epoch(2)
    following = flat(list(source))
    resumed = make()
    resumed.load_state_dict(state)
    assert flat(list(resumed)) == rest
    resumed.set_epoch(2)
    assert flat(list(resumed)) == following
    assert len({tuple(first), tuple(started + rest), tuple(following)}) == 3


# ---- workers


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_over_epochs_and_resume(persistent: bool) -> None:
    def make(workers: int = 2) -> PreparedLoader:
        loader = DataLoader(
            Noisy(13), batch_size=2, shuffle=True, num_workers=workers, persistent_workers=persistent and workers > 0
        )
        return prepare_loader(loader, seed=3)

    source = make()
    epochs = []
    for epoch in range(2):
        source.set_epoch(epoch)
        epochs.append(list(source))
    assert sorted(torch.cat(epochs[1])[:, 0].tolist()) == list(range(13))
    assert len(torch.cat(epochs[0] + epochs[1])[:, 1:].unique()) == 2 * 13 * 3, "augmentation repeats"
    source.set_epoch(1)
    iterator = iter(source)
    next(iterator)
    del iterator
    for workers in (2, 1):
        resumed = make(workers)
        resumed.load_state_dict(source.state_dict(3))
        for batch, expected in zip(resumed, epochs[1][3:], strict=True):
            assert torch.equal(batch, expected)
        resumed.close()
    source.close()
    source.close()


def test_ranks_draw_different_augmentation() -> None:
    ranks = sources(lambda: DataLoader(Noisy(4), batch_size=2, num_workers=1), 2)
    drawn = torch.cat([batch[:, 1:] for source in ranks for batch in source])
    assert len(drawn.unique()) == drawn.numel()


def test_seed_samples_does_not_depend_on_the_layout() -> None:
    def drawn(world: int, workers: int, many: bool = False) -> dict[int, list[float]]:
        class Many(Noisy):
            def __getitems__(self, indices: list[int]) -> list[Any]:
                return [self[index] for index in indices]

        ranks = sources(
            lambda: DataLoader((Many if many else Noisy)(7), batch_size=2, shuffle=True, num_workers=workers),
            world,
            seed_samples=True,
        )
        rows = []
        for source in ranks:
            source.set_epoch(1)
            rows += [row.tolist() for batch in source for row in batch]
        return {int(row[0]): row[1:] for row in rows}

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    reference = drawn(1, 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()
    assert reference == drawn(2, 0) == drawn(1, 1) == drawn(1, 0, many=True)


class Tagged(Numbers):
    tag = 0

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.tag


def _tag(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.dataset.length == 4
    info.dataset.tag = 3


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.campaign)])
def test_worker_options_are_kept(method: str) -> None:
    loader = DataLoader(
        Tagged(4), batch_size=2, num_workers=1, worker_init_fn=_tag, multiprocessing_context=method, prefetch_factor=4
    )
    source = prepare_loader(loader)
    assert isinstance(source, IndexLoader)
    assert flat(list(source)) == [300, 301, 302, 303]
    assert source._workers is not None
    assert source._workers.prefetch_factor == 4


# ---- agreement on what must be alike


def test_ranks_with_different_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.data.loader.gather_object", lambda pair: [pair, (pair[0], {**pair[1], "length": 9})])
    with pytest.raises(DataError, match="length is 9 on rank 1 but 10 on rank 0"):
        prepare_loader(DataLoader(Numbers(10)), world_size=2)


def test_orders_that_differ_between_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = prepare_loader(DataLoader(Numbers(10), sampler=EpochSampler(10)), world_size=2)
    monkeypatch.setattr("instep.data.index.gather_object", lambda obj: [obj, "other"])
    with pytest.raises(DataError, match="EpochSampler gives rank 1 another order"):
        list(source)


def test_a_subclass_needs_to_shard_itself() -> None:
    class Mine(DataLoader[int]):
        pass

    assert flat(list(prepare_loader(Mine(Numbers(5), batch_size=2)))) == list(range(5))
    with pytest.raises(SettingError, match="use_distributed_sampler=False"):
        prepare_loader(Mine(Numbers(5)), world_size=2)
    own = DistributedSampler(Numbers(6), num_replicas=2, rank=0, shuffle=False)
    assert flat(list(prepare_loader(Mine(Numbers(6), sampler=own), world_size=2))) == [0, 2, 4]


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(DataError, match="int cannot be iterated"):
        prepare_loader(3)
    with pytest.raises(SettingError, match="uneven='stp'"):
        prepare_loader([], uneven="stp")


def test_known_orders_are_recognised() -> None:
    data = TensorDataset(torch.arange(6))
    for sampler in (SequentialSampler(data), RandomSampler(data)):
        source = prepare_loader(DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False)))
        assert sorted(torch.cat([batch[0] for batch in source]).tolist()) == list(range(6))
        assert isinstance(source, IndexLoader)
        assert source.batch_size == 4


def test_a_plain_loader_is_prepared_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Counter(flat(list(prepare_loader(DataLoader(Numbers(5)))))) == Counter(range(5))


def test_split_batches_must_come_out_even() -> None:
    with pytest.raises(SettingError, match=r"batches of 10 over 4 ranks.*batch_size=8 or 12") as caught:
        prepare_loader(DataLoader(Numbers(9), batch_size=10), world_size=4, split_batches=True)
    assert (caught.value.field, caught.value.got) == ("batch_size", 10)
    with pytest.raises(SettingError, match=r"batch_size=4$"):
        prepare_loader(DataLoader(Numbers(9), batch_size=3), world_size=4, split_batches=True)
    assert prepare_loader(DataLoader(Numbers(9), batch_size=8), world_size=4, split_batches=True).batch_size == 2
    data = Numbers(9)
    spread = BatchSampler(DistributedSampler(data, 2, 0), 4, False)
    assert (
        len(next(iter(prepare_loader(DataLoader(data, batch_sampler=spread), world_size=2, split_batches=True)))) == 2
    )
    for loader in ([[1, 2], [3, 4]], DataLoader(data, batch_size=None)):
        with pytest.raises(SettingError, match="dispatch=True"):
            prepare_loader(loader, world_size=2, split_batches=True)


def test_split_batches_resume_at_another_world_size() -> None:
    def make() -> DataLoader[int]:
        return DataLoader(Numbers(11), batch_sampler=_Chunks(range(11)))

    class _Chunks(list[Any]):
        def __init__(self, numbers: Any) -> None:
            super().__init__([list(numbers[start : start + 3]) for start in range(0, len(numbers), 3)])

    first = sources(make, 2, split_batches=True)
    taken = []
    for source in first:
        for _number, batch in zip(range(2), source, strict=False):
            taken += batch.tolist()[: source.share.mine]
    resumed = sources(make, 3, split_batches=True)
    for source in resumed:
        source.load_state_dict(first[0].state_dict(2))
    assert sorted(taken + real(resumed)) == list(range(11))


def test_ranks_that_end_alone_weigh_as_if_all_ran() -> None:
    even = sources(lambda: DataLoader(Numbers(9), batch_size=4), 2)
    alone = sources(lambda: DataLoader(Numbers(9), batch_size=4), 2, even_batches=False)
    assert [len(source) for source in even] == [2, 2]
    assert [len(source) for source in alone] == [2, 1]
    assert [window_scale(source, 0, 2) for source in alone] == [window_scale(source, 0, 2) for source in even]
    assert [window_scale(source, 0, 2) for source in alone] == [pytest.approx(4 * 2 / 9)] * 2
    with pytest.raises(SettingError, match="Choose one") as caught:
        prepare_loader([1], even_batches=False, uneven="join")
    assert caught.value.field == "uneven"


@pytest.mark.parametrize("length", [8, 10])
def test_before_the_first_sample_and_at_the_end_a_checkpoint_fits_other_data(length: int) -> None:
    shuffled = prepare_loader(DataLoader(Numbers(8), batch_size=2, shuffle=True))
    in_sequence = prepare_loader(DataLoader(Numbers(length), batch_size=2))
    in_sequence.load_state_dict(shuffled.state_dict(0))
    assert flat(list(in_sequence)) == [*range(length)]
    with pytest.raises(DataError, match="shuffle=False"):
        in_sequence.load_state_dict(shuffled.state_dict(1))
    in_sequence.load_state_dict(shuffled.state_dict(4))
    assert list(in_sequence) == []
    assert flat(list(in_sequence)) == [*range(length)]
