"""Batches that a step takes itself: `training_step(self, dataloader_iter)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Protocol

from instep.data.base import BatchSource
from instep.data.plan import Share
from instep.errors import DataError, HookError

Step = Callable[..., Any]


class Place(Protocol):
    """Place in the training, as the loop counts it."""

    batch: int
    window_batch: int


class Takes(Protocol):
    """What a run keeps of the steps that take their batches themselves."""

    taker: BatchTaker | None
    position: Any


class EndOfBatchesError(Exception):
    """Signal from a step that found no batch left in its middle to the loop."""


class BatchTaker(Iterator[tuple[Any, int, int]]):
    """Iterator that a step is given in place of a batch, and takes its batches from.

    `next` gives (batch, batch_idx, dataloader_idx), the batch on the device and through the transfer hooks. It ends
    with the epoch, or with the loader. A step takes one batch or more; what it keeps for the next step is not seen
    again after a resume. Where it finds none left in the middle, its StopIteration ends the epoch: what it had taken
    trains nothing. All ranks take as many.

    Args:
        batches: of the source, on the device.
        source: knows the sizes of the batch in hand.
        first: batches of the epoch that are done.
        dataloader_idx: index of the loader.
        limit: so many batches are given at most; None for all.
        note: called as `note(batch, batch_idx, samples)` with each batch and this rank's samples in the step so far.
        replay: the context of a step whose batch is one that this rank replays to keep step with the others.

    Attributes:
        fetched: batches of the epoch that were taken.
        length: batches of the epoch; None when unknown.
        done: whether none is left.
        batch, batch_idx: the last one taken.
        ended: whether the last step found none left.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        source: BatchSource,
        *,
        first: int = 0,
        dataloader_idx: int = 0,
        limit: int | None = None,
        note: Callable[[Any, int, int | None], None],
        replay: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        total = source.num_batches
        self.length = limit if total is None else total if limit is None else min(total, limit)
        self.fetched, self.batch_idx, self.batch = first, first, None
        self.done, self.ended = self.length is not None and first >= self.length, False
        self._batches, self._source, self._dataloader_idx, self._limit = batches, source, dataloader_idx, limit
        self._note, self._replay = note, replay
        self._shares: list[Share] = []  # of the step in hand
        self._undo = ExitStack()

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self.done = True
            raise
        share = self._source.share
        self._shares.append(share)
        if share.mine == 0 and len(self._shares) == 1:
            self._undo.enter_context(self._replay())
        if len(self._shares) > 1 and any(one.mine == 0 for one in self._shares):
            raise DataError(
                "the samples do not come out even: this rank has none of its own in one of several batches that a "
                "step took. Set drop_last=True, or take one batch in each step."
            )
        self.batch, self.batch_idx = batch, self.fetched
        self.fetched += 1
        self.done = share.last or self.fetched == self._limit
        mine = [one.mine for one in self._shares]
        self._note(batch, self.batch_idx, None if None in mine else sum(number or 0 for number in mine))
        return batch, self.batch_idx, self._dataloader_idx

    def steps(self) -> Iterator[None]:
        """Give None for each step, while batches are left."""
        while not self.done:
            yield None

    def run(self, step: Callable[[BatchTaker], Any]) -> Any:
        """Run a step, and return what it returned.

        Raises:
            EndOfBatchesError: it found no batch left.
            HookError: it took no batch, and there is one left.
        """
        self._shares.clear()
        with ExitStack() as self._undo:
            try:
                output = step(self)
            except StopIteration:
                if not self.done:
                    raise
                self.ended = True
                raise EndOfBatchesError from None
        if not self._shares and not self.done:
            raise HookError("a step took no batch from its argument dataloader_iter: call next(dataloader_iter)")
        return output

    def weight(self) -> float:
        """Return what this rank's mean over the step's batches counts in a mean over ranks; 1 where all weigh alike."""
        units = [share.units for share in self._shares if share.units is not None]
        everyone = sum(pair[1] for pair in units)
        if len(units) < len(self._shares) or not everyone:
            return 1.0
        return sum(pair[0] for pair in units) * self._source.world_size / everyone


def run_taking(ctx: Takes, step: Step, trains: bool) -> Step:
    """Make the function that runs a step with the taker of the moment, whatever else it is given.

    Where it finds no batch left, a training step raises, and others give None: `ctx.taker.ended` tells.
    """

    def run(*_: Any) -> Any:
        assert ctx.taker is not None
        try:
            return ctx.taker.run(step)
        except EndOfBatchesError:
            if trains:
                raise
            return None

    return run


def count_taken(ctx: Takes, step: Step) -> Step:
    """Let a training step that takes its batches itself count those that it took, each of them as a window."""

    def run(batch: Any, batch_idx: int) -> Any:
        output = None
        with suppress(EndOfBatchesError):
            output = step(batch, batch_idx)
        assert ctx.taker is not None
        place: Place = ctx.position
        place.batch = place.window_batch = ctx.taker.fetched
        return output

    return run


def weight_of_taken(ctx: Takes) -> Callable[..., float]:
    """Make the function that gives the weight of the step in hand, in the place of `window_scale`."""
    return lambda *_: 1.0 if ctx.taker is None else ctx.taker.weight()


def after_taken(ctx: Takes, hooks: Sequence[Step]) -> tuple[Step, ...]:
    """Make hooks after a training batch, which get the last one that the step took; none where it found none left."""

    def of_taken(hook: Step) -> Step:
        def run(outputs: Any, batch: Any, batch_idx: int) -> None:
            if ctx.taker is not None and not ctx.taker.ended:
                hook(outputs, ctx.taker.batch, ctx.taker.batch_idx)

        return run

    return tuple(map(of_taken, hooks))


def noting(progress: Any, log: Any) -> Callable[[Any, int, int | None], None]:
    """Make the function that tells the progress bar and the log of each batch.

    Args:
        progress: of the Trainer; learns `batch_idx`.
        log: learns the batch and its samples; or None.
    """

    def note(batch: Any, batch_idx: int, samples: int | None) -> None:
        progress.batch_idx = batch_idx
        if log is not None:
            log.batch, log.weight = batch, samples

    return note
