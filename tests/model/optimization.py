"""Optimization: how much each sample counts in an update, and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan

from tests.model.data import Dealt
from tests.model.trace import Refused, comparable

RATE = 0.5
"""The learning rate that a run begins with."""


def sample_weights(window: list[Dealt]) -> tuple[tuple[int, float], ...]:
    """Return what each sample counts in an update: the gradient is the mean over all samples of the window and ranks.

    So batches of one size count alike, a smaller last batch counts by its samples, and so does a shorter last window.
    A sample that several ranks have read counts for each of them.
    """
    samples = [sample for dealt in window for sample in dealt.samples]
    return tuple((sample, round(samples.count(sample) / len(samples), 5)) for sample in sorted(set(samples)))


@dataclass(frozen=True)
class Scheduler:
    """A scheduler that halves the rate each time when it steps; a plateau scheduler, when its metric is no better.

    Attributes:
        interval: "step" steps it after optimizer steps, "epoch" after epochs that came to their end.
        frequency: after how many of these.
        plateau: it is `ReduceLROnPlateau(patience=0)`, and its `monitor` is the validation's metric.
        strict: without this metric an error ends the run; else this step is left out.
    """

    interval: str = "epoch"
    frequency: int = 1
    plateau: bool = False
    strict: bool = True


class Rate:
    """The learning rate of a run."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self.scheduler = scheduler
        self.now = RATE
        self.best: float | None = None

    def step_after(self, interval: str, count: int, metrics: Mapping[str, float]) -> tuple[float | str | None] | None:
        """Step the scheduler where it is due.

        Args:
            interval: what has just ended, "step" or "epoch".
            count: how many of them have ended in the whole run.
            metrics: those that are there.

        Returns:
            The argument of `lr_scheduler_step`: the metric, or None for a scheduler without one. Nothing where the
            scheduler is not stepped.
        """
        scheduler = self.scheduler
        if scheduler is None or scheduler.interval != interval or count % scheduler.frequency:
            return None
        if not scheduler.plateau:
            self.now /= 2
            return (None,)
        metric = metrics.get("val")
        if metric is None:
            if scheduler.strict:
                raise Refused("SettingError", "the plateau scheduler's metric was not logged")
            return None
        if not isnan(metric) and (self.best is None or metric < self.best):
            self.best = metric
        else:
            self.now /= 2
        return (comparable(metric),)
