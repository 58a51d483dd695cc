"""Early stopping: what is checked, when, and what the verdict is."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan
from typing import TYPE_CHECKING

from tests.model.trace import Refused

if TYPE_CHECKING:
    from tests.model.run import Run


@dataclass(frozen=True)
class Stopping:
    """Arguments of EarlyStopping, with its names and defaults."""

    monitor: str = "val"
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0
    strict: bool = True
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_on_train_epoch_end: bool | None = None


@dataclass
class Stopper:
    """Checks the metric. The last verdict counts: a run that had to go on to its minimum may be better by then."""

    given: Stopping
    best: float | None = None
    waited: int = 0
    stops: bool = False

    def after_validation(self, run: Run) -> None:
        if not at_epoch_ends(run, self.given.check_on_train_epoch_end):
            self.check(run)

    def after_epoch(self, run: Run) -> None:
        """Check at the end of a complete epoch."""
        if at_epoch_ends(run, self.given.check_on_train_epoch_end):
            self.check(run)

    def check(self, run: Run) -> None:
        if self.given.monitor in run.metrics:
            self.stops = self.judge(run.metrics[self.given.monitor])
        elif self.given.strict:
            raise Refused("UsageError", "the metric of EarlyStopping was not logged")

    def judge(self, value: float) -> bool:
        """Return whether a value stops the run. Of several reasons the first counts, and leaves the patience alone."""
        given, reached = self.given, self.given.stopping_threshold
        if given.check_finite and not isfinite(value):
            return True
        if reached is not None and (value == reached or self.is_better(value, reached)):
            self.best = value if self.best is None or self.is_better(value, self.best) else self.best
            return True
        if given.divergence_threshold is not None and self.is_better(given.divergence_threshold, value):
            return True
        worsened = value + (given.min_delta if given.mode == "min" else -given.min_delta)
        if not isnan(value) and (self.best is None or self.is_better(worsened, self.best)):
            self.best, self.waited = value, 0
            return False
        self.waited += 1
        return self.waited >= given.patience

    def is_better(self, one: float, other: float) -> bool:
        """Return whether one value is better than another; nan is better than none."""
        return one < other if self.given.mode == "min" else one > other


def at_epoch_ends(run: Run, asked: bool | None) -> bool:
    """Return whether a callback acts at the end of epochs, else of validations.

    Left to itself, it acts at the end of epochs where each has one validation at its end, or none ever runs.
    """
    if asked is not None:
        return asked
    s = run.case.settings
    once = isinstance(s.val_check_interval, float) and s.val_check_interval == 1.0 and s.check_val_every_n_epoch == 1
    return once or not run.loaders.validates
