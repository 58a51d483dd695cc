"""Makes the loaders that a user would write."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from instep.data import CombinedLoader, ShardedBatchSampler
from instep.utils.seed import derive_seed
from tests.model.data import Combined, Data
from tests.model_runs.samples import ClaimingStream, Part, Samples, Stream

SEED = 7
"""The seed of the order of shuffled data."""


def draw(data: Data, number: int, cycle: int, epoch: int) -> list[int]:
    """Return the order of an epoch of shuffled data: instep's own, as docs/concepts/data_order.md shows it.

    Args:
        data: the loader.
        number: its number among several that are combined.
        cycle: how often it was begun again in the epoch.
        epoch: the epoch.
    """
    seed = derive_seed(SEED, "loader", number) if number else SEED
    sampler = ShardedBatchSampler(data.samples, batch_size=1, shuffle=True, seed=seed)
    sampler.set_epoch(epoch, cycle)
    drawn = [data.first + index for (index,) in sampler]
    assert sorted(drawn) == data.in_sequence()
    return drawn


def shuffled(data: Data) -> Any:
    """Return the order of shuffled data by its epoch."""
    return lambda epoch: draw(data, 0, 0, epoch)


class Again:
    """Batches of a loader that counts in itself: it goes on where it was left, and begins again at its end."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.at = batches, 0

    def __iter__(self) -> Any:
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class SizedAgain(Again):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.batches)


def loader(data: Data, rank: int = 0, ranks: int = 1) -> Any:
    """Make the loader that a user would write."""
    options: Any = {"num_workers": data.workers, "multiprocessing_context": "fork"} if data.workers else {}
    if data.kind == "iterable":
        stream = Stream(data, rank, ranks) if data.claims is None else ClaimingStream(data, rank, ranks)
        return DataLoader(stream, data.batch_size, drop_last=data.drop_last, **options)
    if data.kind == "parted":
        return DataLoader(Part(data, rank, ranks), data.batch_size, drop_last=data.drop_last, **options)
    if data.kind == "map":
        return DataLoader(Samples(data), data.batch_size, shuffle=data.shuffle, drop_last=data.drop_last, **options)
    if data.kind == "batches":
        sampler = [[sample - data.first for sample in batch] for batch in data.batches(data.in_sequence())]
        return DataLoader(Samples(data), batch_sampler=sampler, **options)
    batches = [torch.tensor(batch) for batch in data.batches(data.part(rank, ranks))]
    if data.kind == "generator":
        return (batch for batch in batches)
    if data.kind == "again":
        return Again(batches) if data.claims is None else SizedAgain(batches)
    return batches


def loaders(data: Data | Combined | None, rank: int = 0, ranks: int = 1) -> Any:
    """Make the loaders of a stage."""
    if data is None or isinstance(data, Data):
        return None if data is None else loader(data, rank, ranks)
    several = [loader(one, rank, ranks) for one in data.loaders]
    if data.given == "list":
        return several
    named = dict(zip("abc", several, strict=False))
    return named if data.given == "dict" else CombinedLoader(named, data.mode)
