"""What a Trainer is doing."""

from __future__ import annotations

from dataclasses import dataclass


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
