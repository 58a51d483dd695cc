"""Data: which samples a batch has, how many batches an epoch has, and what a limit leaves of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from tests.model.trace import Refused

Batch: TypeAlias = tuple[Any, ...]
"""Samples; or of several loaders together their batches, with None for one that has no more."""
Order: TypeAlias = Callable[[int], list[int]]
"""The samples of an epoch in their order, by the number of the epoch."""
Draw: TypeAlias = Callable[..., list[int]]
"""The samples of a loader in their order: by the loader, its number, how often it was begun again, and the epoch."""


def samples_of(batch: Batch) -> tuple[int, ...]:
    """Return the samples of a batch, of all its parts."""
    parts = (samples_of(part) if isinstance(part, tuple) else () if part is None else (part,) for part in batch)
    return tuple(sample for part in parts for sample in part)


class Dealt(NamedTuple):
    """The batches of one step, one for each rank. A rank that has none left repeats one, which does not count."""

    batches: tuple[Batch, ...]
    counts: tuple[bool, ...]

    @property
    def samples(self) -> list[int]:
        """The samples of all ranks that count."""
        own = [samples_of(batch) for batch, counts in zip(self.batches, self.counts, strict=True) if counts]
        return [sample for samples in own for sample in samples]


@dataclass(frozen=True)
class Data:
    """A loader.

    Attributes:
        samples: how many samples there really are. They have the numbers from `first` on.
        batch_size: samples of a batch. The last batch of an epoch may have fewer.
        drop_last: leave out the last batch where it has fewer.
        shuffle: another order in each epoch.
        kind: "map" is a DataLoader over data with indices, "parted" one over a rank's own part of such data, with
            `Trainer(use_distributed_sampler=False)`, and "batches" one with a `batch_sampler` of the user's own;
            "iterable" is a DataLoader over an IterableDataset. Batches without a DataLoader: "list" is a list,
            "generator" gives its values once, and "again" counts in itself: it goes on where it was left, begins again
            at its end, and has a `state_dict`.
        claims: samples that the `__len__` of an iterable dataset says it has, right or wrong; of "again" they are
            right. None: it has no `__len__`.
        first: the number of the first sample.
        sizes: samples of the batches in turn, in place of `batch_size`, where the user makes the batches.
        workers: `num_workers` of a DataLoader. It must change nothing.
        fewer: where the module's hook makes the loader: how many samples fewer it has in each epoch than in the one
            before. One is left.
        parts: which samples a rank reads of an iterable dataset, a list or parted data:
            "same" all, which the ranks divide where the data is iterable, "strided" each n-th of n ranks, "chunks" one
            piece of the row, "first" and "last" all on that rank and none on the others.
    """

    samples: int
    batch_size: int = 1
    drop_last: bool = False
    shuffle: bool = False
    kind: str = "map"
    claims: int | None = None
    first: int = 0
    parts: str = "strided"
    sizes: tuple[int, ...] = ()
    workers: int = 0
    fewer: int = 0

    @property
    def loaders(self) -> tuple[Data, ...]:
        return (self,)

    @property
    def shuffled(self) -> bool:
        return self.shuffle

    @property
    def is_divided(self) -> bool:
        """Whether the ranks share one order of samples: then any number of them goes on at a sample."""
        return self.kind == "map" or (self.kind == "iterable" and self.parts == "same")

    def as_of(self, epoch: int) -> Data:
        """Return the loader that the module's hook makes in an epoch."""
        gone = min(self.fewer * epoch, max(self.samples - 1, 0))
        return replace(self, samples=self.samples - gone)

    def in_sequence(self, epoch: int = 0) -> list[int]:
        """Return the samples in the order in which they are stored."""
        return list(range(self.first, self.first + self.samples))

    def batches(self, order: list[int]) -> list[Batch]:
        """Cut an epoch's samples into batches."""
        batches: list[Batch] = []
        while order:
            size = self.sizes[len(batches) % len(self.sizes)] if self.sizes else self.batch_size
            batches.append(tuple(order[:size]))
            order = order[size:]
        if self.drop_last and batches and len(batches[-1]) < self.batch_size:
            batches.pop()
        return batches

    # ---- over the ranks

    def read(self, draw: Draw, ranks: int, uneven: str) -> list[Dealt]:
        """Return the batches of an epoch whose order is drawn."""
        return self.deal(draw(self, 0, 0), ranks, uneven)

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
        if self.kind == "batches":
            return deal_batches(self.batches(order), ranks)
        if self.kind == "iterable" and self.parts == "same":  # one common order, of which each rank takes its batches
            dealt = deal_batches(self.batches(order), ranks)
            return [step for step in dealt if all(step.counts)] if self.drop_last else dealt
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
        if self.kind in ("map", "parted", "batches", "list") or (self.kind == "again" and self.claims is not None):
            return len(self.deal(self.in_sequence(), ranks, uneven))
        if self.claims is None:
            return None
        size = self.batch_size * (ranks if self.parts == "same" else 1)
        claimed = self.claims // size if self.drop_last else -(-self.claims // size)
        return claimed or self.claims // self.batch_size  # nothing for all: it may be a claim of a rank's own part


def lend_anew(dealt: list[Dealt], begin: int) -> list[Dealt]:
    """Let the ranks that never have a batch repeat the one that another rank has where the run goes on."""
    if not 0 < begin < len(dealt):
        return dealt
    counts = dealt[begin].counts
    spare = dealt[begin].batches[counts.index(True)]
    never = [not any(step.counts[rank] for step in dealt) for rank in range(len(counts))]
    return [
        Dealt(tuple(spare if lacks else own for own, lacks in zip(step.batches, never, strict=True)), step.counts)
        for step in dealt
    ]


def deal_batches(batches: list[Batch], ranks: int) -> list[Dealt]:
    """Deal whole batches out, one to each rank in each step. Those without one repeat the step's first."""
    steps = [batches[start : start + ranks] for start in range(0, len(batches), ranks)]
    return [
        Dealt(
            tuple(step[rank if rank < len(step) else 0] for rank in range(ranks)),
            tuple(rank < len(step) for rank in range(ranks)),
        )
        for step in steps
    ]


@dataclass(frozen=True)
class Combined:
    """Several loaders, of one rank.

    Attributes:
        loaders: these.
        mode: of a CombinedLoader. "min_size" ends with the shortest loader, "max_size" and "max_size_cycle" with the
            longest; the others give None, or begin again, shuffled anew. "sequential" is for validation, and takes
            one after the other.
        given: as a "combined" loader, or as a "dict" or "list", which train in mode "max_size_cycle", and are validated
            one after the other.
    """

    loaders: tuple[Data, ...]
    mode: str = "max_size_cycle"
    given: str = "combined"

    @property
    def shuffled(self) -> bool:
        return any(data.shuffle for data in self.loaders)

    def as_of(self, epoch: int) -> Combined:
        return replace(self, loaders=tuple(data.as_of(epoch) for data in self.loaders))

    def length(self, ranks: int, uneven: str) -> int | None:
        """Return the batches of an epoch, where they are known of all loaders."""
        lengths = [data.length(ranks, uneven) for data in self.loaders]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        return min(known) if self.mode == "min_size" else max(known)

    def read(self, draw: Draw, ranks: int, uneven: str) -> list[Dealt]:
        """Return the batches of an epoch: each has a part of each loader."""
        first = [data.batches(draw(data, number, 0)) for number, data in enumerate(self.loaders)]
        counts = [len(batches) for batches in first]
        if self.mode == "max_size_cycle" and 0 in counts and any(counts):
            raise Refused("DataError", "a loader without a batch cannot begin again")
        steps = min(counts) if self.mode == "min_size" else max(counts)
        return [
            Dealt((tuple(self.part(draw, number, first[number], step) for number in range(len(counts))),), (True,))
            for step in range(steps)
        ]

    def part(self, draw: Draw, number: int, batches: list[Batch], step: int) -> Batch | None:
        """Return a loader's part of a step; `batches` are those of its first round."""
        if step < len(batches):
            return batches[step]
        if self.mode != "max_size_cycle":
            return None
        cycle, step = divmod(step, len(batches))
        return self.loaders[number].batches(draw(self.loaders[number], number, cycle))[step]


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
