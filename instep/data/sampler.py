"""Samplers that divide the order of an epoch over the ranks, as a pure function of (seed, epoch, cursor).

Invariants, for any length, batch size and world size:

- every rank runs the same number of steps (but with `even=False`, a rank without samples leaves the last step out);
- every sample of the epoch belongs to exactly one rank and step (a rank without a sample replays one with weight 0);
- a step takes consecutive samples of the epoch's order, so that an accumulation window holds the same samples at every
  world size, as long as the global batch is the same;
- a pass may begin at any position, even if the samples before it were read with another world size or batch size.

Positions (cursors) are counted in units: samples if instep makes the batches, else whole batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import torch

from instep.errors import SettingError
from instep.utils.checks import at_least
from instep.utils.seed import derive_seed

_ROWS = 1024  # number of batches converted to lists at a time: large enough to be cheap, small enough to start quickly

Draw: TypeAlias = Callable[[int, int, int], "Sequence[Any] | torch.Tensor"]


class ShardedSampler(ABC):
    """Base class of samplers that yield this rank's slice of an epoch's order, step by step.

    Iteration yields the indices of each step from `cursor` to the end, and does not move the cursor.

    Args:
        draw: function that draws the epoch's units by (seed, epoch, cycle), the same on all ranks.
        per_step: units that all ranks together take in a full step.
        seed: seed of the order, the same on all ranks.
        rank: this rank.
        world_size: number of ranks that share the data.
        drop_last: whether to leave out the last step if it is not full.
        even: whether a rank without samples in the last step replays a sample in it.

    Attributes:
        cursor: number of units of the epoch that were used before the pass.
        limit_steps: largest number of steps in an epoch, counted from its start; None for all.
        stop: largest number of units in this epoch; None for all.
    """

    def __init__(
        self, draw: Draw, per_step: int, *, seed: int, rank: int, world_size: int, drop_last: bool, even: bool
    ) -> None:
        if not 0 <= rank < world_size:
            raise SettingError(f"rank={rank} is not within world_size={world_size}", field="rank", got=rank)
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.per_step = per_step
        self.drop_last = drop_last
        self.even = even
        self.epoch = 0
        self.cycle = 0
        self.cursor = 0
        self.limit_steps: int | None = None
        self.stop: int | None = None
        self._draw = draw
        self._order: Sequence[Any] | torch.Tensor = ()
        self.redraw()

    @property
    def length(self) -> int:
        """Number of units (samples or batches) in the epoch."""
        return len(self.order)

    @property
    def order(self) -> Sequence[Any] | torch.Tensor:
        """Units of the epoch in the common order of all ranks: a range, an int64 tensor, or a list of other keys."""
        wanted = (self.seed, self.epoch, self.cycle)
        if self._drawn_for != wanted:
            self._order = self._keep(self._draw(*wanted))
            self._drawn_for = wanted
        return self._order

    def _keep(self, order: Sequence[Any] | torch.Tensor) -> Sequence[Any] | torch.Tensor:
        """Convert the random order of an epoch before it is stored; here, keep it as it is."""
        return order

    def redraw(self) -> None:
        """Forget the order, because the sampler from which it is drawn has changed."""
        self._drawn_for: tuple[int, int, int] | None = None

    @property
    def end(self) -> int:
        """Number of units of the epoch that are used: all, or fewer with `limit_steps` and `stop`."""
        length = self.length if self.stop is None else min(self.length, self.stop)
        return length if self.limit_steps is None else min(length, self.limit_steps * self.per_step)

    def set_epoch(self, epoch: int, cycle: int = 0) -> None:
        """Go to the beginning of an epoch.

        Args:
            epoch: the epoch, from 0.
            cycle: how often the data was restarted within the epoch, as with `max_size_cycle`.
        """
        self.epoch = epoch
        self.cycle = cycle
        self.cursor = 0
        self.stop = None

    @property
    def steps(self) -> int:
        """Number of steps from the cursor to the end, for the rank that has the most steps."""
        return self.steps_of(max(0, self.end - self.cursor))

    def steps_of(self, units: int) -> int:
        """Return the number of steps that the ranks need for this number of units."""
        return units // self.per_step if self.drop_last else -(-units // self.per_step)

    def __len__(self) -> int:
        steps = self.steps
        if steps and not self.even and not self.samples(steps - 1)[0]:
            return steps - 1
        return steps

    @property
    def full_steps(self) -> int:
        """Number of full steps from the cursor on, before the first step that is not full."""
        return max(0, self.end - self.cursor) // self.per_step

    @property
    @abstractmethod
    def even_steps(self) -> int:
        """Number of steps from the cursor on, before the first step whose ranks have different numbers of samples."""

    @abstractmethod
    def samples(self, step: int) -> tuple[int, int]:
        """Return how many samples of a step count, on this rank and on all ranks.

        Args:
            step: index of the step, counted from the cursor.

        Returns:
            The number on this rank (0 if it replays a sample) and on all ranks; (0, 0) after the end. If the sizes of
            batches are not known, batches are counted instead of samples, and `counted` is False.
        """

    @property
    def counted(self) -> bool:
        """Whether `samples` counts samples, not batches."""
        return True

    @abstractmethod
    def indices(self, step: int) -> Any:
        """Return the indices that this rank loads in a step. Steps are counted from the cursor."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...


class ShardedBatchSampler(ShardedSampler):
    """Batches of sample indices for this rank, from one order that all ranks share.

    Step t takes the next `world_size * batch_size` samples of the order, and rank i gets the i-th slice of `batch_size`
    samples. A shorter last step is divided evenly. The order of a shuffled epoch is a permutation drawn by (seed,
    epoch, cycle).

    Args:
        length: number of samples.
        batch_size: samples per rank and step.
        shuffle: whether to permute the samples in every epoch.
        seed: seed of the order, the same on all ranks.
        rank: this rank.
        world_size: number of ranks that share the data.
        drop_last: whether to leave out the last step if it is not full on every rank.
        even: whether a rank without samples in the last step replays a sample in it.
        order: function that draws the order by (seed, epoch, cycle), the same on all ranks; it replaces `length` and
            `shuffle`.

    Example:
        >>> sampler = ShardedBatchSampler(7, 2, shuffle=False, seed=0, rank=1, world_size=2)
        >>> list(sampler), sampler.samples(1)
        ([[2, 3], [6]], (1, 3))
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        even: bool = True,
        order: Draw | None = None,
    ) -> None:
        at_least(1)("batch_size", batch_size)
        super().__init__(
            order or partial(_permuted, length, shuffle),
            world_size * batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            even=even,
        )
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._length = length if order is None else None

    @property
    def length(self) -> int:
        return len(self.order) if self._length is None else self._length

    def _slice(self, step: int) -> tuple[int, int]:
        """Return begin and end of this rank's samples in the order.

        They are equal if this rank has no sample in the step.
        """
        start = self.cursor + step * self.per_step
        have = max(0, min(self.per_step, self.end - start))
        if have == self.per_step:
            begin = start + self.rank * self.batch_size
            return begin, begin + self.batch_size
        begin, end = local_slice(have, self.rank, self.world_size)
        return start + begin, start + end

    @property
    def even_steps(self) -> int:
        return self.full_steps

    def samples(self, step: int) -> tuple[int, int]:
        begin, end = self._slice(step)
        return end - begin, max(0, min(self.per_step, self.end - self.cursor - step * self.per_step))

    def indices(self, step: int) -> list[Any]:
        begin, end = self._slice(step)
        if begin == end:  # this rank has no sample in the step, so it replays the step's first sample with weight 0
            begin = self.cursor + step * self.per_step
            end = begin + 1
        return _as_list(self.order[begin:end])

    def __iter__(self) -> Iterator[list[Any]]:
        order, cursor, size = self.order, self.cursor, self.batch_size
        full, steps = self.full_steps, len(self)
        if isinstance(order, torch.Tensor):
            rows = order[cursor : cursor + full * self.per_step].view(full, self.world_size, size)[:, self.rank]
            for chunk in rows.split(_ROWS):
                yield from chunk.tolist()
        else:
            start = cursor + self.rank * size
            for begin in range(start, start + full * self.per_step, self.per_step):
                yield list(order[begin : begin + size])
        if full < steps:
            yield self.indices(full)


class ShardedBatches(ShardedSampler):
    """Sampler that divides whole batches over the ranks, for a user's own `batch_sampler`.

    In step t, rank i takes batch `t * world_size + i`. If the last step has fewer batches than there are ranks, ranks
    without a batch replay the step's first batch with weight 0.

    Args:
        draw: function of (seed, epoch, cycle) that returns the list of batches, the same on all ranks.
        seed, rank, world_size, drop_last, even: as in `ShardedBatchSampler`.
        single: whether the items are single keys, not batches of keys, so that their sizes are unknown.

    Example:
        >>> batches = [[0, 1], [2], [3, 4], [5]]
        >>> list(ShardedBatches(lambda seed, epoch, cycle: batches, seed=0, rank=1, world_size=2))
        [[2], [5]]
    """

    def __init__(
        self,
        draw: Draw,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        even: bool = True,
        single: bool = False,
    ) -> None:
        super().__init__(draw, world_size, seed=seed, rank=rank, world_size=world_size, drop_last=drop_last, even=even)
        self._single = single
        self._sizes: list[int] | None = None

    def _keep(self, order: Sequence[Any] | torch.Tensor) -> list[Any]:
        batches = _as_list(order)
        known = not self._single and all(isinstance(batch, Sized) for batch in batches)
        self._sizes = [len(batch) for batch in batches] if known else None
        return batches

    @property
    def counted(self) -> bool:
        return self.length > 0 and self._sizes is not None

    @property
    def even_steps(self) -> int:
        full = self.full_steps
        if not full or self._sizes is None:
            return full
        sizes = self._sizes[self.cursor : self.cursor + full * self.per_step]
        return sum(1 for _ in takewhile(sizes[0].__eq__, sizes)) // self.per_step

    def samples(self, step: int) -> tuple[int, int]:
        start = self.cursor + step * self.world_size
        stop = min(start + self.world_size, self.end)
        mine = start + self.rank
        if not self.counted or self._sizes is None:
            return int(mine < stop), max(0, stop - start)
        return (self._sizes[mine] if mine < stop else 0), sum(self._sizes[start : max(start, stop)])

    def indices(self, step: int) -> Any:
        start = self.cursor + step * self.world_size
        mine = start + self.rank
        return self.order[mine if mine < self.end else start]

    def __iter__(self) -> Iterator[Any]:
        return map(self.indices, range(len(self)))


class SplitBatches(ShardedBatches):
    """Sampler that gives each rank a slice of every batch, for batches that instep did not form.

    Each batch is divided evenly. If a batch has fewer samples than there are ranks, ranks without a sample replay the
    batch's first sample.

    Args:
        draw: function that draws the batches by (seed, epoch, cycle), the same on all ranks.
        partitioning: other arguments, as in `ShardedBatches`.
    """

    def __init__(self, draw: Draw, **partitioning: Any) -> None:
        super().__init__(draw, **partitioning)
        self.per_step = 1

    @property
    def even_steps(self) -> int:
        same = super().even_steps
        return 0 if same and len(self.order[self.cursor]) % self.world_size else same

    def samples(self, step: int) -> tuple[int, int]:
        place = self.cursor + step
        size = len(self.order[place]) if place < self.end else 0
        begin, end = local_slice(size, self.rank, self.world_size)
        return end - begin, size

    def indices(self, step: int) -> Any:
        batch = self.order[self.cursor + step]
        begin, end = local_slice(len(batch), self.rank, self.world_size)
        return batch[begin:end] if begin < end else batch[:1]


def local_slice(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return begin and end of a rank's slice of `size` samples.

    Slices are of equal length, but the first ranks may have one sample more.
    """
    part, extra = divmod(size, world_size)
    begin = rank * part + min(rank, extra)
    return begin, begin + part + (rank < extra)


def _permuted(length: int, shuffle: bool, seed: int, epoch: int, cycle: int) -> Sequence[Any] | torch.Tensor:
    """Return a sequential order, or a permutation by (seed, epoch, cycle)."""
    if not shuffle:
        return range(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(derive_seed(seed, "order", epoch, cycle)))


def _as_list(items: Any) -> list[Any]:
    return items.tolist() if isinstance(items, torch.Tensor) else list(items)
