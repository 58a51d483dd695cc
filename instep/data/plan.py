"""Sizes of batches: of the one in hand (`Share`), of all those of a pass (`Plan`), and what a loss weighs by them.

`window_scale` and `gradient_correction` are the arithmetic of accumulation windows whose batches weigh differently: the
Trainer's step and the Accelerator's backward call them, and divide by the number of batches where all weigh alike. A
window begins at each multiple of `accumulate`, or where a resumed pass begins, and ends with the pass at the latest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from instep.errors import DataError


class Share(NamedTuple):
    """The samples of one batch, over the ranks.

    Attributes:
        mine: this rank's samples that count: 0 for a replay, None when unknown.
        all: those of all ranks together; None when unknown.
        last: whether the batch is the pass's last one.
        units: this rank's and all ranks' weight in a common unit (samples, or else batches); None: ranks weigh alike.
    """

    mine: int | None = None
    all: int | None = None
    last: bool = False
    units: tuple[int, int] | None = None


class Plan:
    """The sizes of a pass, as far as they are known when it begins.

    Args:
        first: number of the pass's first batch.
        total: number of the epoch's batches on this rank, limit applied; None when unknown.
        even: batches with a lower number have as many samples as each other, on every rank; `sys.maxsize`: all have.
        exact: `total` decides where the pass ends; else the data does, and `total` is an estimate.
        longest: `total` of the rank that has most batches, where some ranks end earlier.
        at: gives the share of any batch by its number; None where only that of the batch in hand is known.
        seen: gives the samples of all ranks in each of the batches from one number to another that were given already;
            where batches of a window are weighed by samples that are not known before.
    """

    def __init__(
        self,
        first: int,
        total: int | None,
        *,
        even: int,
        exact: bool,
        longest: int | None = None,
        at: Callable[[int], Share] | None = None,
        seen: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        self.first = first
        self.total = total
        self.even = even
        self.exact = exact
        self.longest = total if longest is None else longest
        self.at = at
        self.seen = seen
        self._window: tuple[int, int, int] = (-1, -1, 0)  # begin, end and units of the window last asked for

    @property
    def uniform(self) -> bool:
        """Whether every batch of the pass weighs the same, on every rank."""
        return self.even == sys.maxsize or (self.total is not None and self.even >= self.total)

    def full_batches(self, accumulate: int) -> int:
        """Return the number below which each batch has a `window_scale` of exactly `1 / accumulate`."""
        if self.first % accumulate:
            return 0
        return self.even if self.even == sys.maxsize else self.even // accumulate * accumulate

    def window_of(self, batch_idx: int, accumulate: int) -> tuple[int, int]:
        """Return the first batch of a batch's window, and the number after its last one; a full window's if unknown."""
        start = batch_idx - batch_idx % accumulate
        stop = start + accumulate
        if self.exact and self.longest is not None:
            stop = min(stop, self.longest)
        return max(start, self.first), stop

    def window_units(self, start: int, stop: int) -> int:
        """Return the units of all ranks in the batches from `start` to `stop`."""
        if self._window[:2] != (start, stop):
            assert self.at is not None
            units = [self.at(number).units for number in range(start, stop)]
            self._window = (start, stop, sum(pair[1] for pair in units if pair is not None))
        return self._window[2]

    def seen_in_window(self, start: int, batch_idx: int) -> Sequence[int]:
        """Return the samples of the window's batches up to this one; empty where they are not needed or not known."""
        return () if self.seen is None else self.seen(start, batch_idx + 1)


class Sizes(Protocol):
    """The sizes that a source of batches knows; every `BatchSource` is one."""

    world_size: int
    share: Share

    @property
    def plan(self) -> Plan: ...


def rank_weight(source: Sizes) -> float:
    """Return what this rank's mean over the batch in hand counts in a mean over ranks: 1 where all have as many."""
    units = source.share.units
    return 1.0 if units is None else units[0] * source.world_size / units[1]


def window_scale(source: Sizes, batch_idx: int, accumulate: int) -> float:
    """Return the factor for this rank's mean loss in a batch of an optimizer window.

    A loss that is a mean over this rank's batch, multiplied by it, gives after averaging gradients over ranks and
    adding them up over the window the mean over all samples of the window. Where sample numbers are unknown all batches
    of the window weigh the same. Where the end is unknown too, the window counts as full, and `gradient_correction`
    corrects the gradients at its end.

    Args:
        source: its batch with that number is in hand.
        batch_idx: the batch's number in the epoch.
        accumulate: batches in a full window.

    Raises:
        DataError: the window has no samples.
    """
    plan = source.plan
    start, stop = plan.window_of(batch_idx, accumulate)
    if plan.exact and plan.at is not None:
        units = plan.at(batch_idx).units
        if units is None:
            return 1 / (stop - start)
        total = plan.window_units(start, stop)
        if not total:
            raise DataError(
                f"batch {batch_idx} lies past the data's end at {stop}. A position that was restored does not fit the "
                "data: resume from another checkpoint, or leave the position out by resume=Resume(...)."
            )
        return units[0] * source.world_size / total
    scale = rank_weight(source) / (stop - start)
    seen = plan.seen_in_window(start, batch_idx)
    return scale * seen[-1] / max(1, seen[0]) if seen else scale


def gradient_correction(source: Sizes, batch_idx: int, accumulate: int) -> float:
    """Return what the gradients must be multiplied by after this batch, before the optimizer's step.

    Not 1 only where sizes were unknown when `window_scale` was asked: in the last batch of data without a length, and
    where a window's batches were weighed against its first one.
    """
    plan = source.plan
    if plan.exact:
        return 1.0
    start, stop = plan.window_of(batch_idx, accumulate)
    seen = plan.seen_in_window(start, batch_idx)
    if any(seen):
        return (stop - start) * max(1, seen[0]) / sum(seen)
    return (stop - start) / (batch_idx + 1 - start) if source.share.last else 1.0
