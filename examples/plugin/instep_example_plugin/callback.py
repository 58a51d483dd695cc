"""A callback with a state that goes on after a restart."""

from __future__ import annotations

import math
from typing import Any

from instep import Callback


class BestMetric(Callback):
    """Remember the lowest value of a metric, and the step at which validation gave it.

    Args:
        monitor: the metric's name.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        self.monitor = monitor
        self.best, self.step = math.inf, -1

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Compare the newest value with the best one."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        value = float(trainer.callback_metrics[self.monitor])
        if value < self.best:
            self.best, self.step = value, trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its step, which a checkpoint keeps."""
        return {"best": self.best, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self.best, self.step = state_dict["best"], state_dict["step"]
