"""`EarlyStopping`: the callback that stops training when a metric stops improving."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import torch

from instep.callbacks.base import Callback, acts_now, print_text
from instep.checkpoint.edge import check, count, none_or, text
from instep.errors import UsageError
from instep.utils.checks import FLAG, METRIC, Check, at_least, choice, is_number, or_none
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


WORD = "EarlyStopping: "  # start of the text that gives the reason for a stop
_THRESHOLD = or_none(Check(is_number, "a number, or None"))
_CHECKS = {
    "monitor": METRIC,
    "min_delta": Check(
        lambda value: is_number(value) and value >= 0, "a number of at least 0; mode says which way is better"
    ),
    "patience": at_least(0),
    "verbose": FLAG,
    "mode": choice("min", "max"),
    "strict": FLAG,
    "check_finite": FLAG,
    "stopping_threshold": _THRESHOLD,
    "divergence_threshold": _THRESHOLD,
    "check_on_train_epoch_end": or_none(FLAG),
    "log_rank_zero_only": FLAG,
}


class EarlyStoppingReason(Enum):
    """Why `EarlyStopping` ended the training."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


@dataclass(frozen=True)
class StoppingPolicy:
    """Rule that decides, for each new value of a metric, whether to stop training. `judge` is a pure function.

    NaN is never better than the best value, and counts as a check without improvement. 0.0 and -0.0 are equal. If
    `check_finite` is False, infinity is treated like any other value.
    """

    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    patience: int = 3
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None

    @property
    def worst(self) -> float:
        """The worst possible value, which is used as the best value before the first check."""
        return math.inf if self.mode == "min" else -math.inf

    def better(self, value: float, other: float) -> bool:
        """Return True if `value` is strictly better than `other`."""
        return value < other if self.mode == "min" else value > other

    def judge(self, value: float, best: float, waited: int) -> tuple[EarlyStoppingReason, float, int]:
        """Decide by a new value of the metric whether to stop.

        Args:
            value: the metric's new value.
            best: the metric's best value so far.
            waited: number of checks since the best value.

        Returns:
            The reason to stop, or NOT_STOPPED; the new best value; the new number of checks since the best value.
        """
        if self.check_finite and not math.isfinite(value):
            return EarlyStoppingReason.NON_FINITE_METRIC, best, waited
        if self.stopping_threshold is not None and (
            value == self.stopping_threshold or self.better(value, self.stopping_threshold)
        ):
            return EarlyStoppingReason.STOPPING_THRESHOLD, value if self.better(value, best) else best, waited
        if self.divergence_threshold is not None and self.better(self.divergence_threshold, value):
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, best, waited
        worsened = value + self.min_delta if self.mode == "min" else value - self.min_delta
        if self.better(worsened, best):
            return EarlyStoppingReason.NOT_STOPPED, value, 0
        waited += 1
        exhausted = waited >= self.patience
        return EarlyStoppingReason.PATIENCE_EXHAUSTED if exhausted else EarlyStoppingReason.NOT_STOPPED, best, waited


class EarlyStopping(Callback):
    """Stop training when a monitored metric stops improving.

    The metric is read from `trainer.callback_metrics` at the end of every validation, or of every training epoch. All
    ranks leave the loop at the same step, whichever rank decided to stop. Training does not stop before the Trainer's
    `min_epochs` and `min_steps` are reached. When they are reached, the result of the latest check counts: if the
    metric has improved in the meantime, the run continues.

    NaN never becomes the best value, and always counts as a check without improvement. A checkpoint holds the best
    value, the number of checks since the best value, and the reason of a stop; a resumed run takes the arguments below
    from the new callback.

    Args:
        monitor: the metric's name.
        min_delta: a value counts as an improvement if it is better than the best value by more than this number, which
            is in the metric's unit.
        patience: stop after this many checks in a row without improvement.
        verbose: print every improvement, and the reason of a stop.
        mode: "min" or "max": which way is better.
        strict: True: raise an error if the metric was not logged. False: skip the check, with a warning if `verbose`.
        check_finite: stop at once when the metric is NaN or infinite.
        stopping_threshold: stop at once when the metric reaches this value or is better.
        divergence_threshold: stop at once when the metric is worse than this value.
        check_on_train_epoch_end: check at the end of training epochs (True) or after validations (False). None: at the
            end of training epochs if each has one validation or there is no validation, otherwise after validations.
        log_rank_zero_only: print on global rank 0 only.

    Attributes:
        stopping_reason: an `EarlyStoppingReason`.
        stopping_reason_message: the reason of the stop as text; None while not stopped.
        stopped_epoch: the epoch in which training stopped; 0 while not stopped.
        wait_count: number of checks since the last improvement.

    Raises:
        SettingError: an argument is wrong.
        UsageError: (in the run) `strict` is True and the metric was not logged.

    Example:
        >>> stopping = EarlyStopping("val_loss", patience=2)
        >>> stopping.stopping_reason.name
        'NOT_STOPPED'
    """

    runs_last = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        given = locals()
        for name, check_value in _CHECKS.items():
            check_value(name, given[name])
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.verbose = verbose
        self.mode = mode
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self.policy = StoppingPolicy(mode, min_delta, patience, check_finite, stopping_threshold, divergence_threshold)
        self._reset()

    def _reset(self) -> None:
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self.stopped_epoch = 0
        self.wait_count = 0
        self._best = self.policy.worst

    @property
    def best_score(self) -> torch.Tensor:
        """The best value so far: a 0-dim float64 tensor on the CPU; infinite before the first check."""
        return torch.tensor(self._best, dtype=torch.float64)

    @property
    def state_key(self) -> str:
        """State key with the metric and the mode, so that a Trainer can have several EarlyStopping callbacks."""
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the number of checks since the best value, and the reason and epoch of a stop."""
        return {
            "best_score": self._best,
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score, the wait count and the reason of a stop."""
        kinds = {"wait_count": count, "stopped_epoch": count, "stopping_reason_message": none_or(text)}
        check(state_dict, kinds, "the state")
        self._best = float(state_dict["best_score"])
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.stopping_reason = EarlyStoppingReason(state_dict["stopping_reason"])
        self.stopping_reason_message = state_dict["stopping_reason_message"]

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:
            self._reset()  # an earlier run may have used this callback

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Stop a resumed run at once if EarlyStopping had stopped it before, unless `patience` is larger now."""
        reason = self.stopping_reason
        patient = reason is EarlyStoppingReason.PATIENCE_EXHAUSTED and self.wait_count < self.patience
        if reason is not EarlyStoppingReason.NOT_STOPPED and not patient:
            trainer.set_trigger("stop", reason=f"{WORD}{self.stopping_reason_message}")

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if acts_now(trainer, self.check_on_train_epoch_end, after_validation=True):
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if acts_now(trainer, self.check_on_train_epoch_end, after_validation=False):
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            self._missing(list(metrics))
            return
        trainer.metrics.warn_of_training(self.monitor, f"EarlyStopping(monitor={self.monitor!r})")
        value = float(metrics[self.monitor])
        before = self._best
        reason, self._best, self.wait_count = self.policy.judge(value, self._best, self.wait_count)
        self.stopping_reason = reason
        # An earlier check may have set a reason to stop before min_epochs or min_steps: this check replaces the reason.
        if reason is EarlyStoppingReason.NOT_STOPPED:
            self.stopping_reason_message, self.stopped_epoch = None, 0
        else:
            self.stopping_reason_message = self._words(reason, value)
            self.stopped_epoch = trainer.current_epoch
            trainer.set_trigger("stop", reason=f"{WORD}{self.stopping_reason_message}")
            self._say(trainer, f"{self.stopping_reason_message} Stopping.")
            return
        if self.wait_count == 0:
            by = f", better by {abs(before - value):.4g} than {before:.6g}" if math.isfinite(before) else ""
            self._say(trainer, f"{self.monitor} = {value:.6g}{by}.")

    def _missing(self, available: list[str]) -> None:
        text = (
            f"EarlyStopping watches {self.monitor!r}, which was not logged. "
            f"Available: {', '.join(sorted(available)) or 'nothing yet'}. "
            "Log it by self.log in a hook that runs before the check, or give another monitor"
        )
        if self.strict:
            raise UsageError(f"{text}, or strict=False to leave the check out.")
        if self.verbose:
            warn_user(f"{text}. The check was left out.")

    def _words(self, reason: EarlyStoppingReason, value: float) -> str:
        now = f"{self.monitor} = {value:.6g}"
        best = f"best was {self._best:.6g}"
        if reason is EarlyStoppingReason.NON_FINITE_METRIC:
            return f"{now} is not finite; {best}."
        if reason is EarlyStoppingReason.STOPPING_THRESHOLD:
            return f"Stopping threshold reached: {now}, and the threshold is {self.stopping_threshold:.6g}."
        if reason is EarlyStoppingReason.DIVERGENCE_THRESHOLD:
            return f"Divergence threshold reached: {now}, and the threshold is {self.divergence_threshold:.6g}; {best}."
        return f"{self.monitor} did not improve in the last {self.wait_count} checks; {best}."

    def _say(self, trainer: Trainer, text: str) -> None:
        if not self.verbose:
            return
        if self.log_rank_zero_only or trainer.world_size == 1:
            print_text(trainer, text)
        else:
            sys.stdout.write(clean(f"[rank {trainer.global_rank}] {text}\n"))
