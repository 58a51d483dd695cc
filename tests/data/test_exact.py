"""Every sample counts exactly once, in order: lengths 0 to 40, batch sizes 1 to 8, 1 to 4 ranks, all ways to spread.

Ranks that are played by one process look at a quarter of them, and at passes that begin later where `endings` says so.
Real ranks, which exchange data, look at `endings` only. INSTEP_LENGTHS_EVERY=1 runs everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from instep.data import PreparedLoader, prepare_loader
from instep.data.plan import rank_weight
from instep.state import PartialState
from tests.data.helpers import EVERY, LENGTHS, SIZES, Numbers, endings
from tests.helpers.spawn import run_ranks

WORLDS = range(1, 5)


class Stream(IterableDataset[int]):
    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class Chunks:
    """Batches of indices in sequence, of a class that instep does not know."""

    def __init__(self, length: int, size: int) -> None:
        self.chunks = [list(range(start, min(start + size, length))) for start in range(0, length, size)]

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.chunks)


class Batches:
    """The same as batches of data, without a length."""

    def __init__(self, length: int, size: int) -> None:
        self.chunks = Chunks(length, size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, self.chunks)


def loader(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, collate_fn=torch.tensor, **options)


def counted(source: PreparedLoader) -> list[list[int]]:
    """This rank's rows that count, by step."""
    steps = []
    last = False
    for number, batch in enumerate(source, source.first_batch):
        assert not last, "a batch after the last one"
        mine, total = source.share[:2]
        assert mine is not None
        assert total is not None
        assert mine in (0, len(batch))
        indices = source.sample_indices(number)
        assert indices is None or indices == batch.tolist()
        assert rank_weight(source) == pytest.approx(mine * source.world_size / total)
        steps.append(batch.tolist()[:mine])
        last = source.share.last
    assert last or not steps
    return steps


def in_rank_order(passes: list[list[list[int]]]) -> list[int]:
    return [row for step in zip_longest(*passes, fillvalue=()) for row in chain.from_iterable(step)]


SHARDED = {  # the loader, the settings and how many samples a step has
    "plain": lambda n, size, world: (loader(Numbers(n), batch_size=size), {}, size * world),
    "plain, ends alone": lambda n, size, world: (
        loader(Numbers(n), batch_size=size),
        {"even_batches": False},
        size * world,
    ),
    "split": lambda n, size, world: (
        loader(Numbers(n), batch_size=size * world),
        {"split_batches": True},
        size * world,
    ),
    "batch sampler": lambda n, size, world: (loader(Numbers(n), batch_sampler=Chunks(n, size)), {}, size * world),
    "batch sampler, ends alone": lambda n, size, world: (
        loader(Numbers(n), batch_sampler=Chunks(n, size)),
        {"even_batches": False},
        size * world,
    ),
    "batch sampler, split": lambda n, size, world: (
        loader(Numbers(n), batch_sampler=Chunks(n, size)),
        {"split_batches": True},
        size,
    ),
    "batch sampler, split, ends alone": lambda n, size, world: (
        loader(Numbers(n), batch_sampler=Chunks(n, size)),
        {"split_batches": True, "even_batches": False},
        size,
    ),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", SHARDED)
def test_sharded_loaders_give_every_sample_once_and_in_order(
    mode: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instep.data.loader.gather_object", lambda obj: [obj])  # ranks are played one after the other
    monkeypatch.setattr("instep.data.index.gather_object", lambda obj: [obj])
    closely = endings(world)
    for length in LENGTHS:
        for size in SIZES:
            if not EVERY and (length, size) not in closely and (length + size) % 4:
                continue
            made, options, step = SHARDED[mode](length, size, world)
            ranks = [prepare_loader(made, rank=rank, world_size=world, **options) for rank in range(world)]
            for skip in (0, 1, 3) if (length, size) in closely else (0,):
                for source in ranks:
                    source.set_epoch(0)
                    source.start_at(skip)
                passes = [counted(source) for source in ranks]
                assert in_rank_order(passes) == list(range(min(skip * step, length), length)), (length, size, skip)
                if "alone" in mode:
                    assert "split" in mode or all(chain.from_iterable(passes)), "a step without samples"
                else:
                    assert len({len(steps) for steps in passes}) == 1
            if (length, size) not in closely:
                continue
            state = ranks[0].state_dict(ranks[0].first_batch)
            resumed = [prepare_loader(made, rank=rank, world_size=world, **options) for rank in range(world)]
            for source in resumed:
                source.load_state_dict(state)
            assert [counted(source) for source in resumed] == passes


def every_second(length: int, size: int, rank: int, world: int) -> list[int]:
    """The samples of every `world`-th batch."""
    return list(chain.from_iterable(Chunks(length, size).chunks[rank::world]))


EXCHANGED = {
    "dispatched": lambda n, size, rank, world: (loader(Numbers(n), batch_size=size), {"dispatch": True}, size * world),
    "dispatched stream": lambda n, size, rank, world: (loader(Stream(range(n)), batch_size=size), {}, size * world),
    "dispatched batches": lambda n, size, rank, world: (Batches(n, size), {}, size * world),
    "dispatched, split": lambda n, size, rank, world: (Batches(n, size), {"split_batches": True}, size),
    "dispatched, ends alone": lambda n, size, rank, world: (Batches(n, size), {"even_batches": False}, size * world),
    "joined": lambda n, size, rank, world: (
        loader(Stream(every_second(n, size, rank, world)), batch_size=size),
        {"dispatch": False, "uneven": "join"},
        size * world,
    ),
}


def skips(length: int, size: int, world: int) -> bool:
    """Whether a pass after the first step is tried too."""
    return length > size * world and length % 4 == 1


def cases(mode: str, world: int) -> Iterator[tuple[int, int]]:
    """Lengths and batch sizes that ranks look at who exchange data."""
    for length, size in list(endings(world))[:: 1 if EVERY else 2 * world - 3]:
        if mode != "joined" or length > size * (world - 1):  # where each rank must have a batch
            yield length, size


def _exchanged(mode: str) -> list[list[list[int]]]:
    state = PartialState(cpu=True)
    rank, world = state.process_index, state.num_processes
    passes = []
    for length, size in cases(mode, world):
        made, options, _ = EXCHANGED[mode](length, size, rank, world)
        source = prepare_loader(made, rank=rank, world_size=world, **{"dispatch": None, **options})
        passes.append(counted(source))
        if skips(length, size, world):
            source.set_epoch(0)
            source.start_at(1)
            passes.append(counted(source))
    return passes


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.campaign), 3, pytest.param(4, marks=pytest.mark.campaign)]
)
def test_exchanged_batches_give_every_sample_once_and_in_order(world: int) -> None:
    by_mode = run_ranks(_all_exchanged, world)
    for mode in EXCHANGED:
        expected = []
        for length, size in cases(mode, world):
            step = EXCHANGED[mode](length, size, 0, world)[2]
            expected.append(list(range(length)))
            if skips(length, size, world):
                expected.append(list(range(step, length)))
        ranks = [rank[mode] for rank in by_mode]
        found = [in_rank_order(list(passes)) for passes in zip(*ranks, strict=True)]
        assert found == expected, mode


def _all_exchanged() -> dict[str, Any]:
    return {mode: _exchanged(mode) for mode in EXCHANGED}
