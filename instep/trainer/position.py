"""Position and status of a run: what a checkpoint keeps of the loop, and what the progress bar reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class TrainerState:
    """What runs.

    Attributes:
        fn: "fit", "validate", "test", "predict", or None between runs.
        stage: "sanity_check", "train", "validate", "test", "predict" or None.
        status: "initializing", "running", "finished", "interrupted" or "failed".
    """

    fn: str | None = None
    stage: str | None = None
    status: str = "initializing"

    def begin(self, fn: str) -> None:
        self.fn, self.status = fn, "running"

    def end(self) -> None:
        self.fn = self.stage = None


@dataclass
class Position:
    """Where training is. A checkpoint holds it; the loop alone writes it.

    Attributes:
        epoch: from 0.
        batch: batches done in the epoch.
        window_batch: batches done at the end of the last optimizer window; `batch` but in the middle of a window.
        global_step: optimizer steps done.
        earlier_batches: batches done in the epochs before this one.
        validated: whether the validation that was due at `batch` has run.
        epoch_ended: whether the epoch's end hooks and schedulers have run.
        skipped_rest: whether `on_train_batch_start` asked to leave the rest of the epoch out.
        nonfinite_steps: optimizer steps in which something was not finite, where `Trainer(nonfinite=...)` looks.
    """

    epoch: int = 0
    batch: int = 0
    window_batch: int = 0
    global_step: int = 0
    earlier_batches: int = 0
    validated: bool = False
    epoch_ended: bool = False
    skipped_rest: bool = False
    nonfinite_steps: int = 0

    def next_epoch(self) -> None:
        """Go to the first batch of the next epoch."""
        self.epoch += 1
        self.earlier_batches += self.batch
        self.batch = self.window_batch = 0
        self.validated = self.epoch_ended = self.skipped_rest = False

    def state_dict(self) -> dict[str, Any]:
        """The position at the end of the last optimizer window, where a resumed run goes on."""
        return {**asdict(self), "batch": self.window_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, state_dict.get(field.name, field.default))


class Progress:
    """Counters for the progress bar's thread; plain attributes, no locks.

    Attributes:
        stage: "train", "sanity", "validate", "test", "predict" or None.
        dataloader_idx: which of several evaluation loaders runs.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.stage: str | None = None
        self.dataloader_idx = 0
        self.eval_batch = 0
        self.eval_total: int | None = None
        self.outer_total: int | None = None

    @property
    def batch(self) -> int:
        """Batches done in the running stage's loader."""
        return self._position.batch if self.stage == "train" else self.eval_batch

    @property
    def total(self) -> int | None:
        """Batches of the running stage's loader; None while unknown."""
        return self.outer_total if self.stage == "train" else self.eval_total

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def outer_batch(self) -> int:
        """Training batches done in the epoch, while validation runs."""
        return self._position.batch
