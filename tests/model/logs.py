"""Logs: what `self.log` makes of values, what `callback_metrics` shows, and which rows the loggers get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.model.data import Batch, Dealt
from tests.model.trace import Refused


@dataclass(frozen=True)
class Log:
    """The arguments with which a step logs the mean of its batch's sample numbers.

    None leaves it to the place: training steps log step values, validation steps log epoch values. By default an epoch
    value is of all ranks, and a step value the rank's own; `sync_dist` combines both, or neither.
    """

    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str = "mean"
    sync_dist: bool | None = None


@dataclass
class Name:
    """One logged name, in one epoch of training or in one validation."""

    name: str
    on_step: bool
    on_epoch: bool
    reduce_fx: str = "mean"
    sync_dist: bool | None = None
    values: list[tuple[int, float, int]] = field(default_factory=list)
    """Each batch's rank, its value, and its number of samples."""

    @classmethod
    def of(cls, name: str, log: Log, training: bool) -> Name:
        if log.on_step is False and log.on_epoch is False:
            raise Refused("LogError", "neither a step value nor an epoch value")
        on_step = training if log.on_step is None else log.on_step
        on_epoch = not training if log.on_epoch is None else log.on_epoch
        if not on_step and not on_epoch:
            raise Refused("LogError", "neither a step value nor an epoch value")
        return cls(name, on_step, on_epoch, log.reduce_fx, log.sync_dist)

    @property
    def step_name(self) -> str:
        """The name of the step value; where there are both, each has a name of its own."""
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return f"{self.name}_epoch" if self.on_step else self.name

    def add(self, dealt: Dealt, value_of: Callable[[Batch], float]) -> None:
        """Add what the ranks log of a step's batches. What is repeated does not count."""
        for rank, batch in enumerate(dealt.batches):
            if dealt.counts[rank]:
                self.values.append((rank, value_of(batch), len(batch)))

    def epoch_value(self, rank: int) -> float | None:
        """Reduce the values of all batches; in a mean each sample counts the same. None where there was no batch."""
        own = self.sync_dist is False
        values = [(value, samples) for of, value, samples in self.values if of == rank or not own]
        if not values:
            return None
        if self.reduce_fx == "mean":
            return sum(value * samples for value, samples in values) / sum(samples for _, samples in values)
        return {"sum": sum, "min": min, "max": max}[self.reduce_fx]([value for value, _ in values])


def mean_of(batch: Batch) -> float:
    """Return what a step logs of a batch."""
    return sum(batch) / len(batch)
