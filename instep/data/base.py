"""What a loop knows of its data: one interface for a single loader and for several combined."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from instep.types import StateDict

UNEVEN = ("stop", "join", "error")
OWN_END = "own end"  # ranks do not agree: each goes on to its own end (`even_batches=False`)


class BatchSource(ABC):
    """Batches of this rank, with what the loop must know about them.

    One pass at a time: `set_epoch`, then perhaps `load_state_dict` or `start_at`, then iterate. Batches are numbered
    from 0 in an epoch; a resumed pass begins at `first_batch`. The numbers are alike on all ranks, and so is
    everything here but `counts`' first entry, `sample_indices` and, with `rank_state`, the state. Where ranks may end
    at different numbers (`even_batches=False`), each has its own `num_batches` and `is_last`. All ranks call what
    moves the position: with dispatched data it is a collective, and rank 0's state is the whole one.

    A loss that is a mean over this rank's batch, multiplied by `window_scale`, gives after averaging gradients over
    ranks and adding them up over the window the mean over all samples of the window.

    Args:
        world_size: number of ranks that share the data.

    Attributes:
        is_last: whether the batch in hand is the pass's last one; known before the batch is used.
        first_batch: number of the first batch of this pass.
        epoch: what `set_epoch` was last called with.
        rank_state: the state differs per rank and fits the same world size only.
        history: how many batches back from the last given one `state_dict` can be asked for. Set it to the window's
            size before a pass if states are taken within windows; matters for loaders with a state of their own only.

    Example:
        >>> for epoch in range(2):  # doctest: +SKIP
        ...     source.set_epoch(epoch)
        ...     for batch_idx, batch in enumerate(source, source.first_batch):
        ...         loss = step(batch) * source.window_scale(batch_idx, accumulate)
        ...         if (batch_idx + 1) % accumulate == 0 or source.is_last:
        ...             optimizer.step()
    """

    rank_state: bool = False
    history: int = 1

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.is_last = False
        self.first_batch = 0
        self.epoch = 0
        self.cycle = 0
        self._pending = False  # a position was loaded that no pass has used yet
        self._window: tuple[int, int, int] = (-1, -1, 0)  # begin, end and samples of the window last asked for

    @property
    @abstractmethod
    def num_batches(self) -> int | None:
        """Number of the epoch's batches, limit applied; None when unknown. A resumed pass ends at the same number."""

    @property
    def _longest(self) -> int:
        """`num_batches` of the rank that has most, where ranks without samples end earlier."""
        return len(self)

    @property
    def reliable(self) -> bool:
        """Whether `num_batches` decides where the pass ends; else the data does, and the number is an estimate."""
        return self.num_batches is not None

    @property
    @abstractmethod
    def even_batches(self) -> int:
        """Batches up to this number have the same samples each, on every rank; `sys.maxsize` when all have."""

    def set_epoch(self, epoch: int, cycle: int = 0) -> None:
        """Go to the beginning of an epoch, unless a state of this epoch was loaded that no pass has used yet."""
        if not (self._pending and (epoch, cycle) == (self.epoch, self.cycle)):
            self._enter(epoch, cycle)

    @abstractmethod
    def _enter(self, epoch: int, cycle: int) -> None:
        """Go to the beginning of an epoch."""

    @abstractmethod
    def start_at(self, batches: int) -> None:
        """Begin the next pass after that many batches of the epoch."""

    @abstractmethod
    def state_dict(self, batches_done: int) -> StateDict:
        """Where the data stands.

        Args:
            batches_done: batches of the epoch that are done: those the source gave, or up to `history` less.
        """

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Begin the next pass where the state says, in the state's epoch and order."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """This rank's batches."""

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"{type(self).__name__} has no length: the number of batches is not known")
        return self.num_batches

    def __bool__(self) -> bool:
        return True  # not by the length, which may be unknown

    def _units(self, batch_idx: int) -> tuple[int, int] | None:
        """This rank's and all ranks' weight of a batch in any common unit; None where nothing is known."""
        return None

    def counts(self, batch_idx: int) -> tuple[int | None, int | None]:
        """True sample numbers of a batch: this rank's (0 for a replay) and all ranks'; None when unknown."""
        return None, None

    def sample_indices(self, batch_idx: int) -> list[Any] | None:
        """The data set's indices that make up this rank's batch; None when unknown."""
        return None

    @property
    def uniform(self) -> bool:
        """Whether every batch of the pass weighs the same, on every rank."""
        even = self.even_batches
        return even == sys.maxsize or (self.num_batches is not None and even >= self.num_batches)

    def weight(self, batch_idx: int) -> float:
        """What this rank's mean over the batch counts in a mean over ranks: 1 when all ranks have as many samples."""
        units = self._units(batch_idx)
        return 1.0 if units is None else units[0] * self.world_size / units[1]

    def full_batches(self, accumulate: int) -> int:
        """Batches with a number below this have a `window_scale` of exactly `1 / accumulate`."""
        if self.first_batch % accumulate:
            return 0
        even = self.even_batches
        return even if even == sys.maxsize else even // accumulate * accumulate

    def window_scale(self, batch_idx: int, accumulate: int) -> float:
        """The factor for this rank's mean loss in a batch of an optimizer window.

        Where sample numbers are unknown all batches of the window weigh the same. Where the end is unknown too, the
        window counts as full, and `rescale` corrects the gradients at its end.

        Args:
            batch_idx: the batch's number in the epoch.
            accumulate: batches in a full window; windows begin at multiples of it.
        """
        start = batch_idx - batch_idx % accumulate
        stop = start + accumulate
        start = max(start, self.first_batch)
        if not self.reliable:
            return self.weight(batch_idx) / (stop - start)
        stop = min(stop, self._longest)
        units = self._units(batch_idx)
        if units is None:
            return 1 / (stop - start)
        if self._window[:2] != (start, stop):
            numbers = [self._units(other) for other in range(start, stop)]
            self._window = (start, stop, sum(number[1] for number in numbers if number is not None))
        return units[0] * self.world_size / self._window[2]

    def rescale(self, batch_idx: int, accumulate: int) -> float:
        """What the gradients must be multiplied by after this batch, before the optimizer's step.

        Not 1 only in the last batch of data whose end was unknown when `window_scale` was asked.
        """
        if self.reliable or not self.is_last:
            return 1.0
        start = batch_idx - batch_idx % accumulate
        first = max(start, self.first_batch)
        return (start + accumulate - first) / (batch_idx + 1 - first)

    def close(self) -> None:  # noqa: B027 (most sources hold nothing)
        """Let go of worker processes. May be called twice; the source can still be iterated afterwards."""

    def _start_pass(self) -> None:
        """What an iteration does first: it takes up the position that was loaded, or begins the epoch anew."""
        if not self._pending:
            self._enter(self.epoch, self.cycle)
        self._pending = self.is_last = False

    def _begin(self, first_batch: int) -> None:
        self.first_batch = first_batch
        self.is_last = False
        self._window = (-1, -1, 0)


class Seat(NamedTuple):
    """A rank among those that share the data.

    Attributes:
        rank: this rank.
        world_size: number of ranks that run in step.
        seed: what everything random about the data is derived from, alike on all ranks.
    """

    rank: int
    world_size: int
    seed: int


class PreparedLoader(BatchSource):
    """One loader, made ready for this rank by `prepare_loader`.

    Args:
        loader: the user's loader.
        seat: whose batches it gives.
        frozen: every epoch is the first one again.

    Attributes:
        loader: the user's loader, untouched.
        dataset: its data set, or None.
        batch_size: samples per rank and batch, None when unknown.
    """

    def __init__(self, loader: Any, seat: Seat, *, frozen: bool = False) -> None:
        super().__init__(seat.world_size)
        self.loader = loader
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        self.rank = seat.rank
        self.seed = seat.seed
        self.frozen = frozen
        self._set_epochs = _set_epoch_methods(loader)

    def reseed(self, seed: int) -> None:
        """Derive everything random from another seed."""
        self.seed = seed

    def _enter(self, epoch: int, cycle: int) -> None:
        """Go to the beginning of an epoch, and tell the parts of the user's loader that want to know."""
        self.epoch, self.cycle, self._pending = epoch, cycle, False
        for method in self._set_epochs:
            method(0 if self.frozen else epoch)
        self._begin(0)


def _set_epoch_methods(loader: Any) -> list[Callable[[int], Any]]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts.append(getattr(loader, "dataset", None))
    unique = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
    return [part.set_epoch for part in unique.values()]
