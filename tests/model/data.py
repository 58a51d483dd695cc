"""Data: which samples a batch has, how many batches an epoch has, and what a limit leaves of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.trace import Refused

Batch = tuple[int, ...]
Order = Callable[[int], list[int]]
"""The samples of an epoch in their order, by the number of the epoch."""


class Dealt(NamedTuple):
    """The batches of one step, one for each rank. A rank that has none left repeats one, which does not count."""

    batches: tuple[Batch, ...]
    counts: tuple[bool, ...]

    @property
    def samples(self) -> list[int]:
        """The samples of all ranks that count."""
        return [sample for batch, counts in zip(self.batches, self.counts, strict=True) if counts for sample in batch]


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
        parts: which samples a rank reads of an iterable dataset or of a list: "same" all, "strided" every n-th of n
            ranks, "chunks" one piece of the row, "first" and "last" all on that rank and none on the others.
    """

    samples: int
    batch_size: int = 1
    drop_last: bool = False
    shuffle: bool = False
    kind: str = "map"
    claims: int | None = None
    first: int = 0
    parts: str = "strided"

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

    # ---- over the ranks

    def part(self, rank: int, ranks: int) -> list[int]:
        """Return the samples that a rank reads where instep cannot divide them."""
        samples = self.in_sequence()
        if self.parts == "strided":
            return samples[rank::ranks]
        if self.parts == "chunks":
            size = -(-len(samples) // ranks)
            return samples[rank * size : (rank + 1) * size]
        reads = self.parts == "same" or rank == (0 if self.parts == "first" else ranks - 1)
        return samples if reads else []

    def deal(self, order: list[int], ranks: int, uneven: str) -> list[Dealt]:
        """Return the batches of an epoch for all ranks.

        Args:
            order: of the epoch's samples.
            ranks: how many there are.
            uneven: where ranks read data of their own, the epoch ends with the first ("stop") or the last ("join").
        """
        if self.kind == "map":
            return self.deal_samples(order, ranks)
        own = [self.batches(self.part(rank, ranks) if ranks > 1 else order) for rank in range(ranks)]
        lengths = [len(batches) for batches in own]
        steps = min(lengths) if uneven == "stop" else max(lengths)
        # A rank repeats the last of its batches; one that never had any gets the first of another rank.
        spare = next((batches[0] for batches in own if batches), ())
        return [
            Dealt(
                tuple(batches[step] if step < len(batches) else (batches or [spare])[-1] for batches in own),
                tuple(step < len(batches) for batches in own),
            )
            for step in range(steps)
        ]

    def deal_samples(self, order: list[int], ranks: int) -> list[Dealt]:
        """Deal the samples out: `batch_size` to each rank in each step; of the rest, each gets as many, or one more.

        In a last step with fewer samples than ranks, those without one repeat the step's first sample. With `drop_last`
        there is no such step.
        """
        size, full = self.batch_size, self.batch_size * ranks
        dealt: list[Dealt] = []
        for start in range(0, len(order), full):
            rest = order[start : start + full]
            if len(rest) == full:
                batches = [tuple(rest[rank * size : (rank + 1) * size]) for rank in range(ranks)]
            elif self.drop_last:
                break
            else:
                part, more = divmod(len(rest), ranks)
                ends = [(rank + 1) * part + min(rank + 1, more) for rank in range(ranks)]
                batches = [tuple(rest[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
            dealt.append(Dealt(tuple(batch or (rest[0],) for batch in batches), tuple(map(bool, batches))))
        return dealt

    def length(self, ranks: int, uneven: str) -> int | None:
        """Return the batches of an epoch for each rank, as far as they are known before it; None if nothing is known.

        Of an iterable dataset this is a claim. Fractions are taken of it, but the data decides where an epoch ends.
        """
        if self.kind != "iterable":
            return len(self.deal(self.in_sequence(), ranks, uneven))
        if self.claims is None:
            return None
        return self.claims // self.batch_size if self.drop_last else -(-self.claims // self.batch_size)


def limit_in_batches(limit: int | float, length: int | None, setting: str) -> int | None:
    """Return the number of batches that a limit allows in an epoch; None where it allows all.

    An int is a number of batches. A float is a fraction of the epoch, rounded down: 1 is one batch, 1.0 is all. Each
    rank has as many.
    """
    if isinstance(limit, int):
        return limit
    if limit == 1.0:
        return None
    if limit == 0.0:
        return 0
    if length is None:
        raise Refused("SettingError", f"{setting}={limit} is a fraction of an unknown length", early=True)
    if length == 0:
        return None  # of a wrong length of 0 no fraction can be taken: what there is counts
    batches = int(length * limit)
    if batches == 0:
        raise Refused("SettingError", f"{setting}={limit} is less than one batch", early=True)
    return batches


def expected_batches(length: int | None, limit: int | None) -> int | None:
    """Return how many batches an epoch should have: the smaller of what the data says and the limit."""
    known = [number for number in (length, limit) if number is not None]
    return min(known) if known else None
