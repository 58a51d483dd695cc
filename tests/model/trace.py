"""What is seen of a run: events in their order, and refusals."""

from __future__ import annotations

from typing import Any, NamedTuple


class Event(NamedTuple):
    """One thing that a run does.

    Attributes:
        owner: "C" a callback, "M" the module, "O" the optimizer, "-" the run itself.
        name: of the hook or method; "error" for what ends the run.
        args: batches as tuples of sample numbers, indices, rates, metrics; of an error the class's name.
        step: `trainer.global_step` at that moment: optimizer steps that are done.
        epoch: `trainer.current_epoch` at that moment.
    """

    owner: str
    name: str
    args: tuple[Any, ...]
    step: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}{self.args} at step {self.step}, epoch {self.epoch}"


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
