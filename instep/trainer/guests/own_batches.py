"""Training and evaluation steps that take their batches themselves, such as `training_step(self, dataloader_iter)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from instep.data.base import BatchSource
from instep.data.plan import Share
from instep.errors import DataError, HookError, SettingError
from instep.trainer.context import Progress
from instep.trainer.guests import Step, StepGuest, StepParts, arguments_of
from instep.trainer.hooks import Hook
from instep.trainer.log import MetricLog


class _EndOfBatches(Exception):
    """Exception for a step that asked for a batch when none was left. Such a step does not count."""


class StepIterator(Iterator[tuple[Any, int, int]]):
    """Iterator that a step gets in place of a batch. The step takes its batches from it.

    `next` returns (batch, batch_idx, dataloader_idx); the batch is on the device and has passed the transfer hooks. The
    iterator ends when the epoch, or in evaluation the loader, has no batch left. A step takes one batch or more. A
    batch that a step keeps for the next step is lost in a resume. If a step asks for a batch when none is left, it gets
    StopIteration. If the step does not catch this error, the epoch ends, and the batches that this step had taken are
    not trained on. All ranks take the same number of batches.

    Args:
        batches: batches of `source`, on the device.
        source: source of the batches; `source.share` has the numbers of samples in the current batch.
        first: number of batches of the epoch that are done already.
        dataloader_idx: index of the loader.
        limit: maximum number of batches; None for all.
        progress: progress counters of the Trainer; `progress.batch_idx` is updated.
        log: log whose batch and number of samples are updated; None if nothing is logged.

    Attributes:
        fetched: batches of the epoch that were taken.
        length: batches of the epoch; None when unknown.
        done: whether no batch is left.
        batch, batch_idx: the last batch taken, and its index.
        ended: whether the last step found no batch left.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        source: BatchSource,
        progress: Progress,
        log: MetricLog | None,
        first: int = 0,
        dataloader_idx: int = 0,
        limit: int | None = None,
    ) -> None:
        total = source.num_batches
        self.length = limit if total is None else total if limit is None else min(total, limit)
        self.fetched, self.batch_idx, self.batch = first, first, None
        self.done, self.ended = self.length is not None and first >= self.length, False
        self._batches, self._source, self._dataloader_idx, self._limit = batches, source, dataloader_idx, limit
        self._progress, self._log = progress, log
        self._ahead: list[Any] = []  # the first batch of the next step
        self._shares: list[Share] = []  # numbers of samples of each batch that the current step took

    def __next__(self) -> tuple[Any, int, int]:
        if self.done:
            raise StopIteration
        if not self._ahead:
            self._fetch()
        batch, share = self._ahead.pop(), self._source.share
        self._shares.append(share)
        if len(self._shares) > 1 and any(one.mine == 0 for one in self._shares):
            raise DataError(
                "the samples do not come out even: this rank has none of its own in one of several batches that a "
                "step took. Set drop_last=True, or take one batch in each step."
            )
        self.batch, self.batch_idx = batch, self.fetched
        self.fetched += 1
        self.done = share.last or self.fetched == self._limit
        self._progress.batch_idx = self.batch_idx
        if self._log is not None:
            mine = [one.mine for one in self._shares]
            self._log.batch = batch
            self._log.weight = None if None in mine else sum(number or 0 for number in mine)
        return batch, self.batch_idx, self._dataloader_idx

    def _fetch(self) -> None:
        try:
            self._ahead.append(next(self._batches))
        except StopIteration:
            self.done = True
            raise

    def steps(self) -> Iterator[None]:
        """Fetch the first batch of each step and yield None for the step, until no batch is left."""
        while not self.done:
            try:
                self._fetch()
            except StopIteration:
                return
            yield None

    def run(self, step: Step) -> Any:
        """Run a step, and return what it returned.

        Raises:
            _EndOfBatches: the step found no batch left.
            HookError: the step took no batch.
        """
        self._shares.clear()
        try:
            output = step(self)
        except StopIteration:
            if not self.done:
                raise
            self.ended = True
            raise _EndOfBatches from None
        if not self._shares:
            raise HookError("a step took no batch from its argument dataloader_iter: call next(dataloader_iter)")
        return output

    def weight(self) -> float:
        """Return the factor for this rank's mean loss. With it, the mean over ranks is the mean over all samples.

        The factor is 1 if all ranks have the same number of samples in the step, or if the number is unknown.
        """
        units = [share.units for share in self._shares if share.units is not None]
        everyone = sum(pair[1] for pair in units)
        if len(units) < len(self._shares) or not everyone:
            return 1.0
        return sum(pair[0] for pair in units) * self._source.world_size / everyone


class OwnBatches(StepGuest):
    """Feature (guest) that passes a `StepIterator` to steps with the argument `dataloader_iter`, and counts batches."""

    _taker: StepIterator | None = None

    def _takes(self, name: str) -> bool:
        """Return whether a step method takes its batches itself: its argument is named `dataloader_iter`.

        Raises:
            HookError: the method has further arguments, which nothing passes.
        """
        names = list(arguments_of(self.ctx.module, name))
        if "dataloader_iter" not in names:
            return False
        if len(names) > 1:
            step = getattr(self.ctx.module, name)
            raise HookError(
                f"{getattr(step, '__qualname__', step)} has dataloader_iter and {', '.join(names)}: dataloader_iter "
                "stands alone, since next(dataloader_iter) gives (batch, batch_idx, dataloader_idx)"
            )
        return True

    def batches(self, name: str, batches: Iterator[Any], source: BatchSource, **place: Any) -> Iterator[Any]:
        """Return an iterator that yields None for each step as long as batches are left.

        If the step method `name` does not take its batches itself, return `batches` unchanged.
        """
        self.ended = False
        if not self._takes(name):
            return batches
        outer, log = self._taker, place.pop("log", None)
        self._taker = StepIterator(batches, source, self.ctx.trainer.progress, log, **place)
        return self._steps(self._taker, outer)

    def _steps(self, taker: StepIterator, outer: StepIterator | None) -> Iterator[None]:
        try:
            yield from taker.steps()
        finally:
            self._taker = outer  # after an evaluation, set the iterator of the training again

    def step_method(self, name: str, step: Step) -> Step:
        """Return a wrapper that calls the step method with the current `StepIterator` in place of a batch."""
        if not self._takes(name):
            return step
        progress = self.ctx.trainer.progress

        def run(*_: Any) -> Any:
            taker = self._taker
            assert taker is not None
            if name == "training_step":
                return taker.run(step)
            try:
                return taker.run(step)
            except _EndOfBatches:
                return None
            finally:
                # count all batches of this step except the last one, which the loop itself counts
                self.ended, progress.eval_batch = taker.ended, taker.fetched - 1

        return run

    def hooks_after(self, name: str, hooks: tuple[Hook, ...]) -> tuple[Hook, ...]:
        """Return the hooks, wrapped to get the last batch that the step took.

        They do not run if the step found no batch.
        """

        def of_taken(hook: Hook) -> Hook:
            def run(outputs: Any, batch: Any, batch_idx: int, *rest: Any) -> None:
                taker = self._taker
                if taker is not None and not taker.ended:
                    hook(outputs, taker.batch, taker.batch_idx, *rest)

            return run

        return tuple(map(of_taken, hooks)) if self._takes(name) else hooks

    # ---- the training step

    def check(self) -> None:
        """Raise SettingError if the step takes its batches itself and gradients are accumulated too."""
        if (most := self.ctx.loaders.most_accumulated) > 1 and self._takes("training_step"):
            raise SettingError(
                f"accumulate_grad_batches={most}: training_step(dataloader_iter) takes its batches itself, so let it "
                "take as many as an optimizer step needs, and leave accumulation out (global_batch_size may ask for "
                "it, too).",
                field="accumulate_grad_batches",
                got=most,
            )

    def take(self, parts: StepParts) -> None:
        """Weight the loss of each step by the number of samples that the step took."""
        if not self._takes("training_step"):
            return
        parts.full_batches, parts.weigh = 0, self._weigh
        parts.around.append("the step takes batches by itself")

    def _weigh(self, batch_idx: int) -> float:
        return 1.0 if self._taker is None else self._taker.weight()

    def finish(self, parts: StepParts) -> None:
        """Count the batches that a step took, and close the accumulation window after each step."""
        if not self._takes("training_step"):
            return
        step, at = parts.step, self.ctx.position

        def run(batch: Any, batch_idx: int) -> Any:
            output = None
            with suppress(_EndOfBatches):
                output = step(batch, batch_idx)
            assert self._taker is not None
            self.ended = self._taker.ended
            at.batch = at.window_batch = self._taker.fetched
            return output

        parts.step = run
