"""Numbers of samples in the current batch (`Share`) and in a whole pass (`Plan`), and the weights of losses from them.

`window_scale` and `gradient_correction` compute the weights in accumulation windows whose batches have different sizes.
The Trainer's step and the Accelerator's backward call them. If all batches have the same size, the loss is only divided
by the number of batches. A window has `accumulate` batches, or fewer at the end of the pass. Windows are counted from
the batch `origin`, with which the first window of this size began. A resumed pass also begins a window. `derive` and
`derive_phases` split a global batch over processes and micro-batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from instep.errors import DataError, SettingError


class Share(NamedTuple):
    """Number of samples in one batch, on this rank and on all ranks.

    Attributes:
        mine: number of this rank's samples that count: 0 if the rank only replays a batch, None if unknown.
        all: number of samples of all ranks together; None if unknown.
        last: whether the batch is the pass's last one.
        units: weight of this rank and sum of the weights of all ranks, in samples, or in batches if samples are
            unknown; None if all ranks have the same weight.
    """

    mine: int | None = None
    all: int | None = None
    last: bool = False
    units: tuple[int, int] | None = None


class Plan:
    """Sizes of the batches of a pass, as far as they are known when it begins.

    Args:
        first: index of the pass's first batch in the epoch.
        total: number of the epoch's batches on this rank, with the limit; None if unknown.
        uniform_until: batch index below which all batches have the same number of samples, on every rank;
            `sys.maxsize` if this is true of all batches.
        alike: whether all ranks have the same number of samples in every batch; always True with one rank.
        total_is_final: whether `total` decides where the pass ends; else the data does, and `total` is an estimate.
        longest_total: `total` of the rank with the most batches, if some ranks end earlier.
        share_of: function that returns the share of any batch by its index; None if only the share of the current
            batch is known.
        sizes_seen: function of two batch indices that returns the samples of all ranks in each yielded batch between
            them, for data whose sizes are not known in advance; its result is empty if all batches have the same
            weight.
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
        # begin, end and total weight of the accumulation window that was last requested
        self._window: tuple[int, int, int] = (-1, -1, 0)

    @property
    def uniform(self) -> bool:
        """Whether every batch of the pass has the same number of samples, on every rank."""
        return self.uniform_until == sys.maxsize or (self.total is not None and self.uniform_until >= self.total)

    def full_batches(self, accumulate: int, origin: int = 0) -> int:
        """Return the batch index below which every batch has a `window_scale` of exactly `1 / accumulate`."""
        if accumulate == 1 and self.alike:
            return sys.maxsize
        if self.first > origin and (self.first - origin) % accumulate:
            return 0
        end = self.uniform_until
        return end if end == sys.maxsize else origin + (end - origin) // accumulate * accumulate

    def window_of(self, batch_idx: int, accumulate: int, origin: int = 0) -> tuple[int, int]:
        """Return the index of the first batch of a batch's accumulation window, and the index after its last batch.

        The window is taken as full if the end of the data is unknown.
        """
        start = batch_idx - (batch_idx - origin) % accumulate
        stop = start + accumulate
        if self.total_is_final and self.longest_total is not None:
            stop = min(stop, self.longest_total)
        return max(start, self.first), stop

    @property
    def corrects(self) -> bool:
        """Whether an accumulation window of several batches needs `gradient_correction` at its end."""
        return not self.total_is_final or self.sizes_seen is not None

    def window_units(self, start: int, stop: int) -> int:
        """Return the total weight (`Share.units`) of all ranks in the batches from `start` to `stop`."""
        if self._window[:2] != (start, stop):
            assert self.share_of is not None
            units = [self.share_of(number).units for number in range(start, stop)]
            self._window = (start, stop, sum(pair[1] for pair in units if pair is not None))
        return self._window[2]

    def seen_in_window(self, start: int, batch_idx: int) -> Sequence[int]:
        """Return the numbers of samples in the batches of the accumulation window up to `batch_idx`.

        The result is empty if these numbers are unknown or not needed.
        """
        return () if self.sizes_seen is None else self.sizes_seen(start, batch_idx + 1)


class Sizes(Protocol):
    """Protocol of a source that knows the sizes of its batches, such as a `BatchSource`."""

    world_size: int
    share: Share

    @property
    def plan(self) -> Plan: ...


def rank_weight(source: Sizes) -> float:
    """Return the factor for this rank's mean loss with which the mean over ranks equals the mean over all samples.

    The factor is 1 if all ranks have the same number of samples.
    """
    units = source.share.units
    return 1.0 if units is None else units[0] * source.world_size / units[1]


def window_scale(source: Sizes, batch_idx: int, accumulate: int, origin: int = 0) -> float:
    """Return the factor for this rank's mean loss in a batch of an accumulation window.

    Multiply the mean loss over this rank's batch by the factor. When gradients are then averaged over ranks and added
    up over the window, the result is the mean over all samples of the window. If the sizes are not known beforehand,
    a batch is weighed relative to the window's first batch, which counts as full, and `gradient_correction` corrects
    the gradients at the window's end. Batches whose samples cannot be counted have the same weight.

    Args:
        source: source of the batches; its current batch is `batch_idx`.
        batch_idx: index of the batch in the epoch.
        accumulate: batches in a full window.
        origin: batch from which windows are counted.

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
    """Return the factor for the gradients at the end of an accumulation window, before the optimizer's step.

    The factor is 1 if `window_scale` knew the sizes of the window's batches. Otherwise it corrects two errors: the
    window has fewer batches than expected, or its batches differ in size.
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
        loader_batch_size: the loader's batch size, which is the largest size of a micro-batch.

    Returns:
        (samples per micro-batch and process, micro-batches per optimizer step): with the fewest micro-batches for which
            the division is exact.

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
    """Split global batches of changing size into micro-batches of one size: only their number per step changes.

    Args:
        sizes: dict from an optimizer step to the samples per optimizer step, over all processes, from then on.
        world_size: processes that share the data.
        loader_batch_size: the largest size of a micro-batch.

    Returns:
        Samples per micro-batch and process (the largest number that divides all sizes exactly); and a dict from an
        optimizer step to the number of micro-batches per optimizer step from then on.

    Raises:
        SettingError: a global batch does not divide over the processes.

    Example:
        >>> derive_phases({0: 64, 1000: 256}, world_size=2, loader_batch_size=32)
        (32, {0: 1, 1000: 4})
    """
    for size in sizes.values():
        derive(size, world_size, loader_batch_size)  # this call raises SettingError if `size` does not divide
    micro_batch, _ = derive(math.gcd(*sizes.values()), world_size, loader_batch_size)
    return micro_batch, {step: size // world_size // micro_batch for step, size in sizes.items()}


def phase_at(phases: Mapping[int, int], step: int) -> tuple[int, int | float]:
    """Return the value at a step, and the step of its next change. `phases` has each value under its first step."""
    holds = max(begin for begin in phases if begin <= step)
    return phases[holds], min((begin for begin in phases if begin > step), default=math.inf)


def steps_in_phases(batches: int, epochs: int, phases: Mapping[int, int]) -> int:
    """Return the number of optimizer steps in `epochs` epochs, if the micro-batches per step change at given steps."""
    step = 0
    for _ in range(epochs):
        left = batches
        while left > 0:
            accumulate, change = phase_at(phases, step)
            windows = min(math.ceil(left / accumulate), change - step)
            step, left = step + int(windows), left - int(windows) * accumulate
    return step
