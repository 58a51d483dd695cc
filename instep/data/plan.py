"""Sizes of batches: of the one in hand (`Share`), of all those of a pass (`Plan`), and what a loss weighs by them.

`window_scale` and `gradient_correction` are the arithmetic of accumulation windows whose batches weigh differently: the
Trainer's step and the Accelerator's backward call them, and divide by the number of batches where all weigh alike. A
window has `accumulate` batches and ends with the pass at the latest. Windows are counted from the batch `origin`, where
a window of that size began first; and one begins where a resumed pass does. `derive` and `derive_phases` split a global
batch over processes and micro-batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from instep.errors import DataError, SettingError


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
        uniform_until: batches with a lower number have as many samples as each other, on every rank; `sys.maxsize`:
            all have.
        alike: the ranks have as many samples as each other in every batch, as one rank has.
        total_is_final: `total` decides where the pass ends; else the data does, and `total` is an estimate.
        longest_total: `total` of the rank that has most batches, where some ranks end earlier.
        share_of: gives the share of any batch by its number; None where only that of the batch in hand is known.
        sizes_seen: gives the samples of all ranks in each of the batches from one number to another that were given
            already, where they are known only then; nothing where the batches weigh the same.
    """

    def __init__(
        self,
        first: int,
        total: int | None,
        *,
        uniform_until: int,
        total_is_final: bool,
        alike: bool = False,
        longest_total: int | None = None,
        share_of: Callable[[int], Share] | None = None,
        sizes_seen: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        self.first = first
        self.total = total
        self.uniform_until = uniform_until
        self.total_is_final = total_is_final
        self.alike = alike
        self.longest_total = total if longest_total is None else longest_total
        self.share_of = share_of
        self.sizes_seen = sizes_seen
        self._window: tuple[int, int, int] = (-1, -1, 0)  # begin, end and units of the window last asked for

    @property
    def uniform(self) -> bool:
        """Whether every batch of the pass weighs the same, on every rank."""
        return self.uniform_until == sys.maxsize or (self.total is not None and self.uniform_until >= self.total)

    def full_batches(self, accumulate: int, origin: int = 0) -> int:
        """Return the number below which each batch has a `window_scale` of exactly `1 / accumulate`."""
        if accumulate == 1 and self.alike:
            return sys.maxsize
        if self.first > origin and (self.first - origin) % accumulate:
            return 0
        end = self.uniform_until
        return end if end == sys.maxsize else origin + (end - origin) // accumulate * accumulate

    def window_of(self, batch_idx: int, accumulate: int, origin: int = 0) -> tuple[int, int]:
        """Return the first batch of a batch's window, and the number after its last one; a full window's if unknown."""
        start = batch_idx - (batch_idx - origin) % accumulate
        stop = start + accumulate
        if self.total_is_final and self.longest_total is not None:
            stop = min(stop, self.longest_total)
        return max(start, self.first), stop

    @property
    def corrects(self) -> bool:
        """Whether `gradient_correction` is needed at the end of a window of several batches."""
        return not self.total_is_final or self.sizes_seen is not None

    def window_units(self, start: int, stop: int) -> int:
        """Return the units of all ranks in the batches from `start` to `stop`."""
        if self._window[:2] != (start, stop):
            assert self.share_of is not None
            units = [self.share_of(number).units for number in range(start, stop)]
            self._window = (start, stop, sum(pair[1] for pair in units if pair is not None))
        return self._window[2]

    def seen_in_window(self, start: int, batch_idx: int) -> Sequence[int]:
        """Return the samples of the window's batches up to this one; empty where they are not needed or not known."""
        return () if self.sizes_seen is None else self.sizes_seen(start, batch_idx + 1)


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


def window_scale(source: Sizes, batch_idx: int, accumulate: int, origin: int = 0) -> float:
    """Return the factor for this rank's mean loss in a batch of an optimizer window.

    A loss that is a mean over this rank's batch, multiplied by it, gives after averaging gradients over ranks and
    adding them up over the window the mean over all samples of the window. Where they are not known beforehand the
    batches are weighed against the window's first one, which counts as full, and `gradient_correction` corrects the
    gradients at its end. Batches that have no samples to count weigh the same.

    Args:
        source: its batch with that number is in hand.
        batch_idx: the batch's number in the epoch.
        accumulate: batches in a full window.
        origin: the batch that windows are counted from.

    Raises:
        DataError: the window has no samples.
    """
    plan = source.plan
    start, stop = plan.window_of(batch_idx, accumulate, origin)
    if plan.total_is_final and plan.share_of is not None:
        units = plan.share_of(batch_idx).units
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


def gradient_correction(source: Sizes, batch_idx: int, accumulate: int, origin: int = 0) -> float:
    """Return what the gradients must be multiplied by after this batch, before the optimizer's step.

    Not 1 only where sizes were unknown when `window_scale` was asked, and the window is shorter or its batches differ.
    """
    plan = source.plan
    if not plan.corrects:
        return 1.0
    start, stop = plan.window_of(batch_idx, accumulate, origin)
    seen = plan.seen_in_window(start, batch_idx)
    if any(seen):
        return (stop - start) * max(1, seen[0]) / sum(seen)
    return (stop - start) / (batch_idx + 1 - start) if source.share.last and not plan.total_is_final else 1.0


# ---- a global batch of given size


def derive(global_batch_size: int, world_size: int, loader_batch_size: int) -> tuple[int, int]:
    """Split a global batch exactly over processes and micro-batches.

    Args:
        global_batch_size: samples per optimizer step, over all processes.
        world_size: processes that share the data.
        loader_batch_size: the loader's batch size: the most samples that one micro-batch may have.

    Returns:
        (samples per micro-batch and process, micro-batches per optimizer step): the fewest micro-batches that come out
        even.

    Raises:
        SettingError: the global batch does not divide over the processes.

    Example:
        >>> derive(256, world_size=4, loader_batch_size=32)
        (32, 2)
    """
    per_rank, rest = divmod(global_batch_size, world_size)
    if rest:
        usable = [size * world_size for size in (per_rank, per_rank + 1) if size]
        raise SettingError(
            f"global_batch_size={global_batch_size} does not divide over {world_size} processes. "
            f"Nearest: {' or '.join(map(str, usable))}.",
            field="global_batch_size",
            got=global_batch_size,
        )
    fewest = -(-per_rank // loader_batch_size)
    accumulate = next(count for count in range(fewest, per_rank + 1) if per_rank % count == 0)
    return per_rank // accumulate, accumulate


def derive_phases(sizes: Mapping[int, int], world_size: int, loader_batch_size: int) -> tuple[int, dict[int, int]]:
    """Split global batches that grow over a run: micro-batches of one size, more and more of them per optimizer step.

    Args:
        sizes: samples per optimizer step over all processes, by the optimizer step from which they hold.
        world_size: processes that share the data.
        loader_batch_size: the most samples that one micro-batch may have.

    Returns:
        Samples per micro-batch and process, the most that come out even for each size; and the micro-batches per
        optimizer step, by the optimizer step from which they hold.

    Raises:
        SettingError: a global batch does not divide over the processes.

    Example:
        >>> derive_phases({0: 64, 1000: 256}, world_size=2, loader_batch_size=32)
        (32, {0: 1, 1000: 4})
    """
    for size in sizes.values():
        derive(size, world_size, loader_batch_size)  # each must divide
    micro_batch, _ = derive(math.gcd(*sizes.values()), world_size, loader_batch_size)
    return micro_batch, {step: size // world_size // micro_batch for step, size in sizes.items()}


def phase_at(phases: Mapping[int, int], step: int) -> tuple[int, int | float]:
    """Return the value that holds at a step, of values by the step from which they hold; and the step that ends it."""
    holds = max(begin for begin in phases if begin <= step)
    return phases[holds], min((begin for begin in phases if begin > step), default=math.inf)


def steps_in_phases(batches: int, epochs: int, phases: Mapping[int, int]) -> int:
    """Return the optimizer steps of so many epochs, where the micro-batches per step change at given steps."""
    step = 0
    for _ in range(epochs):
        left = batches
        while left > 0:
            accumulate, change = phase_at(phases, step)
            windows = min(math.ceil(left / accumulate), change - step)
            step, left = step + int(windows), left - int(windows) * accumulate
    return step
