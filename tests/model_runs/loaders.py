"""Makes the loaders that a user would write."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from instep.data import ShardedBatchSampler
from tests.model.data import Data

SEED = 7
"""The seed of the order of shuffled data."""


def shuffled(data: Data) -> Any:
    """Return the order of an epoch of shuffled data: instep's own, as docs/concepts/data_order.md shows it."""
    sampler = ShardedBatchSampler(data.samples, batch_size=1, shuffle=True, seed=SEED)

    def order(epoch: int) -> list[int]:
        sampler.set_epoch(epoch)
        drawn = [data.first + index for (index,) in sampler]
        assert sorted(drawn) == data.in_sequence()
        return drawn

    return order


class Samples(Dataset[int]):
    """Numbers from `first` on."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.samples

    def __getitem__(self, index: int) -> int:
        return self.data.first + index


class Stream(IterableDataset[int]):
    """The same numbers one after the other, or a rank's part of them."""

    def __init__(self, data: Data, rank: int = 0, ranks: int = 1) -> None:
        self.data, self.rank, self.ranks = data, rank, ranks

    def __iter__(self) -> Any:
        return iter(self.data.part(self.rank, self.ranks))


class ClaimingStream(Stream):
    """The same with a length, which may be wrong."""

    def __len__(self) -> int:
        assert self.data.claims is not None
        return self.data.claims


def loader(data: Data, rank: int = 0, ranks: int = 1) -> Any:
    """Make the loader that a user would write."""
    if data.kind == "list":
        return [torch.tensor(batch) for batch in data.batches(data.part(rank, ranks))]
    if data.kind == "iterable":
        stream = Stream(data, rank, ranks) if data.claims is None else ClaimingStream(data, rank, ranks)
        return DataLoader(stream, data.batch_size, drop_last=data.drop_last)
    return DataLoader(Samples(data), data.batch_size, shuffle=data.shuffle, drop_last=data.drop_last)
