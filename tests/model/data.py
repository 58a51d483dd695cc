"""Data: which samples a batch has, how many batches an epoch has, and what a limit leaves of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.model.trace import Refused

Batch = tuple[int, ...]
Order = Callable[[int], list[int]]
"""The samples of an epoch in their order, by the number of the epoch."""


@dataclass(frozen=True)
class Data:
    """A loader.

    Attributes:
        samples: how many samples there really are. They have the numbers from `first` on.
        batch_size: samples of a batch. The last batch of an epoch may have fewer.
        drop_last: leave out the last batch where it has fewer.
        shuffle: another order in each epoch.
        kind: "map" is a DataLoader over data with indices, "iterable" a DataLoader over an IterableDataset, "list" a
            list of batches.
        claims: samples that an iterable dataset's `__len__` says it has, right or wrong; None: it has no `__len__`.
        first: the number of the first sample.
    """

    samples: int
    batch_size: int = 1
    drop_last: bool = False
    shuffle: bool = False
    kind: str = "map"
    claims: int | None = None
    first: int = 0

    def in_sequence(self, epoch: int = 0) -> list[int]:
        """Return the samples in the order in which they are stored."""
        return list(range(self.first, self.first + self.samples))

    def batches(self, order: list[int]) -> list[Batch]:
        """Cut an epoch's samples into batches."""
        size = self.batch_size
        batches = [tuple(order[start : start + size]) for start in range(0, len(order), size)]
        if self.drop_last and batches and len(batches[-1]) < size:
            batches.pop()
        return batches

    @property
    def length(self) -> int | None:
        """Batches of an epoch, as far as they are known before it; None where nothing is known.

        Of an iterable dataset this is a claim. Fractions are taken of it, but the data decides where an epoch ends.
        """
        samples = self.claims if self.kind == "iterable" else self.samples
        if samples is None:
            return None
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


def limit_in_batches(limit: int | float, data: Data, setting: str) -> int | None:
    """Return the number of batches that a limit allows in an epoch; None where it allows all.

    An int is a number of batches. A float is a fraction of the epoch, rounded down: 1 is one batch, 1.0 is all.
    """
    if isinstance(limit, int):
        return limit
    if limit == 1.0:
        return None
    if limit == 0.0:
        return 0
    if data.length is None:
        raise Refused("SettingError", f"{setting}={limit} is a fraction of an unknown length", early=True)
    if data.length == 0:
        return None  # of a wrong length of 0 no fraction can be taken: what there is counts
    batches = int(data.length * limit)
    if batches == 0:
        raise Refused("SettingError", f"{setting}={limit} is less than one batch", early=True)
    return batches


def expected_batches(data: Data, limit: int | None) -> int | None:
    """Return how many batches an epoch should have: the smaller of what the data says and the limit."""
    known = [number for number in (data.length, limit) if number is not None]
    return min(known) if known else None
