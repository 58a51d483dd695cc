"""`Timer`: stop training after a given time, and measure how long each stage takes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from instep.callbacks.base import Callback, print_text
from instep.utils.checks import choice, parse_duration

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_STAGES = ("train", "validate", "test")
# seconds between two requests to stop, which are repeated because the Trainer first completes `min_steps`
_AGAIN_S = 1.0


class Timer(Callback):
    """Stop training after a given time.

    Only rank 0's clock counts, and all ranks leave the loop at the same step. After a restart, the training time before
    the restart counts too.

    Args:
        duration: the time to train, as "DD:HH:MM:SS", a timedelta, or a dict of timedelta's arguments; with 0 no step
            is done. None: only measure.
        interval: "step" or "epoch": check the time after every step or every epoch.
        verbose: print a line when the time is over.

    Raises:
        SettingError: an argument is wrong.

    Example:
        >>> timer = Timer(duration="00:12:00:00")
        >>> timer.time_remaining("train")
        43200.0
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, float] | int | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        self.duration_s = (
            None if duration is None else parse_duration("duration", duration, or_zero=True).total_seconds()
        )
        self.interval = choice("step", "epoch")("interval", interval)
        if interval == "step":  # set the hook only if needed, since it costs a call at each step
            self.on_train_batch_end = self._after_batch
        self.verbose = verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._before: dict[str, float] = dict.fromkeys(_STAGES, 0.0)
        self._deadline = float("inf")
        self._warned = False

    def start_time(self, stage: str = "train") -> float | None:
        """Return the time of the stage's last start, in seconds of `time.monotonic`; None if it has not begun."""
        return self._start.get(_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the time of the stage's last end, in seconds of `time.monotonic`; None if it has not ended."""
        return self._end.get(_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in this stage, including the time before a restart."""
        stage = _stage(stage)
        start = self._start.get(stage)
        if start is None:
            return self._before[stage]
        return self._before[stage] + self._end.get(stage, time.monotonic()) - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds of `duration` that are left; None without a duration."""
        return None if self.duration_s is None else self.duration_s - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds spent in each stage."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the seconds that were spent in each stage before the restart."""
        self._start, self._end = {}, {}  # what this object has measured itself is in the restored seconds
        self._before.update({str(stage): float(elapsed_s) for stage, elapsed_s in state_dict["time_elapsed"].items()})

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self.load_state_dict({"time_elapsed": dict.fromkeys(_STAGES, 0.0)})  # an earlier run may have used it

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._warned = False
        remaining = self.time_remaining()
        self._begin("train")
        self._deadline = float("inf")
        if remaining is not None and trainer.is_global_zero:
            self._deadline = time.monotonic() + remaining
            if remaining <= 0:
                self._stop(trainer)

    def _after_batch(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Call the hook of a subclass, if the subclass defines this hook.
        type(self).on_train_batch_end(self, trainer, module, outputs, batch, batch_idx)
        if time.monotonic() >= self._deadline:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if time.monotonic() >= self._deadline:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("train")

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("validate")

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish("test")

    def _begin(self, stage: str) -> None:
        if stage in self._end:
            self._before[stage] = self.time_elapsed(stage)
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def _finish(self, stage: str) -> None:
        self._end[stage] = time.monotonic()

    def _stop(self, trainer: Trainer) -> None:
        self._deadline = time.monotonic() + _AGAIN_S
        trainer.set_trigger("stop", reason=f"Timer: {self.duration_s:g} s are over")
        if self.verbose and not self._warned:
            self._warned = True
            print_text(
                trainer, f"Timer: the {timedelta(seconds=self.duration_s or 0)} given for training are over. Stopping."
            )


def _stage(stage: str) -> str:
    return choice(*_STAGES)("stage", str(getattr(stage, "value", stage)))
