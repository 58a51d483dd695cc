"""What is seen of a run: events in their order, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One thing that a run does.

    Attributes:
        owner: "C" a callback, "M" the module, "O" the optimizer, "L" the loggers, "D" the disk, "S" a checkpoint of the
            newest state, "V" what the Trainer shows of logged values, "F" the CSV file, "-" the run itself.
        name: of the hook or method; "error" for what ends the run.
        args: batches as tuples of sample numbers, indices, rates, metrics; of an error the class's name.
        step: `trainer.global_step` at that moment: optimizer steps that are done.
        epoch: `trainer.current_epoch` at that moment.
        metrics: `trainer.callback_metrics` at that moment, sorted by name.
    """

    owner: str
    name: str
    args: tuple[Any, ...]
    step: int
    epoch: int
    metrics: tuple[tuple[str, float | str], ...] = ()

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}{self.args} at step {self.step}, epoch {self.epoch}, {dict(self.metrics)}"


def rounded(values: Mapping[str, float]) -> tuple[tuple[str, float | str], ...]:
    """Return named values so that they can be compared."""
    return tuple((name, comparable(value)) for name, value in sorted(values.items()))


def comparable(value: float) -> float | str:
    """Return a value so that it can be compared: nan, which is equal to nothing, as a word; a tie is rounded up."""
    return "nan" if isnan(value) else round(value + 1e-6, 3)


class Refused(Exception):
    """An error that the run must end with.

    Attributes:
        kind: the class's name in `instep.errors`.
        early: it comes before the first training step. Where exactly is left open.
    """

    def __init__(self, kind: str, why: str, early: bool = False) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind = kind
        self.early = early
