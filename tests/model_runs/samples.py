"""Data sets of numbers, without instep: runs on Lightning use them too."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from tests.model.data import Data


class Samples(Dataset[int]):
    """Numbers from `first` on."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.samples

    def __getitem__(self, index: int) -> int:
        return self.data.first + index


class Part(Samples):
    """A rank's part of them."""

    def __init__(self, data: Data, rank: int, ranks: int) -> None:
        super().__init__(data)
        self.part = data.part(rank, ranks)

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> int:
        return self.part[index]


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
