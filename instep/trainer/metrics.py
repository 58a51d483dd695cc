"""Values of a run for display and logging: the last value of each logged name, and what goes to the loggers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.callbacks.base import is_terminal
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer
    from instep.trainer.log import EpochMetric, MetricLog, StepMetrics

_ENDS, _MOST_NAN = ("_step", "_epoch"), 8


class Metrics:
    """Last values of all logged names. New values are sent to the loggers.

    Args:
        trainer: the Trainer, whose loggers get the values.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.callback: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.bar: dict[str, float] = {}
        self.nan_since: dict[str, int] = {}
        """Names whose last known value is nan, and the step at which nan was seen first."""
        self._eval_steps: dict[str, int] = {}
        self._of_validation: dict[str, bool] = {}
        """Names that validation has logged -> whether an epoch value of training has replaced validation's value."""
        self.warned: set[str] = set()
        """Callbacks and schedulers that this run has warned about, and hooks whose batch size it has checked.

        Each of them is warned about at most once.
        """

    def log_steps(self, arrived: Sequence[StepMetrics]) -> None:
        """Send step values to the loggers, with the epoch beside them."""
        for metrics, step, bar in arrived:
            if self._trainer.state.stage == "train":
                self.callback.update(metrics)
                self._look_for_nan(metrics, step)
            self.bar.update(bar)
            if metrics and self._trainer.settings.log_every_n_steps:
                self.logged.update(metrics)
                self._send(metrics, step)

    def keep(self, log: MetricLog) -> None:
        """Keep the step values of a log before another log replaces this log, since callbacks may watch the values."""
        values = {name: float(value) for name, value in log.callback_values.items()}
        self.callback.update(values)
        self._look_for_nan(values, self._trainer.global_step)
        self.bar.update({name: float(value) for name, value in log.bar_values(on_device=True).items()})

    def put_epoch(self, metrics: Sequence[EpochMetric], final: bool = True) -> None:
        """Record epoch values, which replace step values of the same name. Final values are sent to the loggers."""
        to_log: dict[str, float] = {}
        ctx, stage = self._trainer._ctx, self._trainer.state.stage
        logs = [log for log in (self._trainer._log, ctx and ctx.log) if log is not None]
        for name, value, options, plain, _ in metrics:
            self.callback[name] = self.callback[plain] = value
            for one in (name, plain):
                if stage == "validate" or one in self._of_validation:
                    self._of_validation[one] = stage == "train"
            self._look_for_nan({name: value, plain: value}, self._trainer.global_step)
            for log in logs:
                log.step_values.pop(name, None)
                log.step_values.pop(plain, None)
            if options.prog_bar:
                self.bar[name] = value
            if options.logger is not False:
                to_log[name] = value
        if final and to_log:
            self.logged.update(to_log)
            self._send(to_log, self._trainer.global_step)

    def warn_of_training(self, name: str, reader: str) -> None:
        """Warn once if training has replaced the validation value of a metric that a callback or scheduler reads.

        Args:
            name: the metric.
            reader: description of the callback or scheduler that decides by this metric, for the warning.
        """
        replaced = self._of_validation.get(name)
        if replaced is False and self._trainer._log is not None:
            # whether training has logged a newer step value under this name
            replaced = name in self._trainer._log.callback_values
        if replaced and reader not in self.warned and self._trainer.is_global_zero:
            self.warned.add(reader)
            warn_user(
                f"{reader} goes by training's {name!r}, not by validation's: both log this name, and training's value "
                f"is the later one. Log validation's under a name of its own, such as self.log('val_{name}', ...), and "
                "monitor that"
            )

    def _look_for_nan(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if math.isnan(value):
                self.nan_since.setdefault(name, step)
            elif self.nan_since:
                self.nan_since.pop(name, None)

    def describe_nan(self) -> str:
        """Describe which values are nan, and since which step; "" if no value is nan.

        Before this, call `keep` with the current log.
        """
        since = self.nan_since
        plain = [name for name in since if not any(name == f"{other}{end}" for other in since for end in _ENDS)]
        by_step: dict[int, list[str]] = {}
        for name in plain:
            by_step.setdefault(since[name], []).append(name)
        parts = []
        for step, names in sorted(by_step.items()):
            *others, last = names if len(names) <= _MOST_NAN else [*names[:_MOST_NAN], f"{len(names) - _MOST_NAN} more"]
            parts.append(f"{', '.join(others)} and {last} are" if others else f"{last} is")
            parts[-1] += f" nan since step {step:,}"
        return "; ".join(parts)

    def _send(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics to the loggers, together with the epoch. A metric named "step" is the user's own x-axis."""
        own_step = metrics.get("step", math.nan)
        if math.isfinite(own_step):
            metrics, step = {name: value for name, value in metrics.items() if name != "step"}, int(own_step)
        metrics = {**metrics, "epoch": metrics.get("epoch", float(self._trainer.current_epoch))}
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step)

    def next_eval_step(self, stage: str) -> int:
        """Return the next step number for the step values of an evaluation. Each stage has its own count."""
        self._eval_steps[stage] = self._eval_steps.get(stage, 0) + 1
        return self._eval_steps[stage]

    def forget(self) -> None:
        """Drop all values.

        Called at the start of a run, and after a sanity check, whose metrics do not belong to the run.
        """
        self.callback.clear()
        self.logged.clear()
        self.bar.clear()
        self.nan_since.clear()
        self._of_validation.clear()
        self.warned.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "callback": dict(self.callback),
            "logged": dict(self.logged),
            "bar": dict(self.bar),
            "nan_since": dict(self.nan_since),
            "eval_steps": dict(self._eval_steps),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.callback, self.logged, self.bar = (dict(state_dict[key]) for key in ("callback", "logged", "bar"))
        self.nan_since = dict(state_dict.get("nan_since", {}))
        self._eval_steps = dict(state_dict["eval_steps"])


def as_tensors(metrics: dict[str, Any]) -> dict[str, Tensor]:
    """Return metrics as 0-dim tensors, as Lightning does. Numbers become float64; tensors keep their dtype."""
    return {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
    }


def print_results(results: Sequence[dict[str, float]], stage: str) -> None:
    """Print the metrics of validate or test: as a table on a terminal or in a notebook, elsewhere as JSON lines."""
    if not (is_terminal(sys.stdout) or "ipykernel" in sys.modules):
        for index, metrics in enumerate(results):
            print(f"{stage} (loader {index}): {json.dumps(metrics)}")  # noqa: T201  verbose=True asks for it
        return
    from rich.console import Console  # imported late: only output for people needs it
    from rich.table import Table
    from rich.text import Text

    table = Table(title=stage)
    table.add_column("metric")
    for index in range(len(results)):
        table.add_column("value" if len(results) == 1 else f"loader {index}", justify="right")
    for name in dict.fromkeys(name for metrics in results for name in metrics):
        values = [f"{metrics[name]:.6g}" if name in metrics else "" for metrics in results]
        table.add_row(Text(clean(name, "")), *values)
    Console(force_jupyter=False).print(table)  # print as text, since a rank forked by a notebook cannot display HTML
