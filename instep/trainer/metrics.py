"""The metrics that callbacks, loggers and the progress bar see."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.trainer.log import EpochMetric, LogBook, StepMetrics

if TYPE_CHECKING:
    from instep.trainer.trainer import Trainer


class Metrics:
    """Holds the last value of everything logged, and sends it to the loggers.

    Args:
        trainer: whose loggers they are.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.callback: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.bar: dict[str, float] = {}
        self._eval_steps: dict[str, int] = {}

    def log_steps(self, arrived: Sequence[StepMetrics]) -> None:
        """Send step values to the loggers, with the epoch beside them."""
        for metrics, step, bar in arrived:
            self.callback.update(metrics)
            self.bar.update(bar)
            if metrics and self._trainer.settings.log_every_n_steps:
                self.logged.update(metrics)
                self._send({**metrics, "epoch": float(self._trainer.current_epoch)}, step)

    def keep(self, book: LogBook) -> None:
        """Take the step values as they stand, of a book that gives way to another: callbacks may watch them."""
        self.callback.update({name: float(value) for name, value in book.step_values.items()})
        self.bar.update({name: float(value) for name, value in book.bar_values(on_device=True).items()})

    def put_epoch(self, metrics: Sequence[EpochMetric], final: bool = True) -> None:
        """Take epoch values; the final ones go to the loggers. They replace older step values of the same name."""
        to_log: dict[str, float] = {}
        session = self._trainer._session
        books = [book for book in (self._trainer._book, session and session.book) if book is not None]
        for name, value, options, plain, _ in metrics:
            self.callback[name] = self.callback[plain] = value
            for book in books:
                book.step_values.pop(name, None)
                book.step_values.pop(plain, None)
            if options.prog_bar:
                self.bar[name] = value
            if options.logger is not False:
                to_log[name] = value
        if final and to_log:
            self.logged.update(to_log)
            self._send({**to_log, "epoch": float(self._trainer.current_epoch)}, self._trainer.global_step)

    def _send(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics, step)

    def next_eval_step(self, stage: str) -> int:
        """The x-axis of step values logged in evaluation: their own count."""
        self._eval_steps[stage] = self._eval_steps.get(stage, 0) + 1
        return self._eval_steps[stage]

    def forget(self) -> None:
        """Drop all values; what the sanity check logged is nobody's metric."""
        self.callback.clear()
        self.logged.clear()
        self.bar.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            "callback": dict(self.callback),
            "logged": dict(self.logged),
            "bar": dict(self.bar),
            "eval_steps": dict(self._eval_steps),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.callback, self.logged, self.bar = (dict(state_dict[key]) for key in ("callback", "logged", "bar"))
        self._eval_steps = dict(state_dict["eval_steps"])


def as_tensors(metrics: dict[str, Any]) -> dict[str, Tensor]:
    """Metrics as users of Lightning read them: 0-dim tensors, in float64 unless they are tensors already."""
    return {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
    }


def print_results(results: Sequence[dict[str, float]], stage: str) -> None:
    """Print what validate or test measured, as a table on a terminal and as JSON lines elsewhere."""
    if not sys.stdout.isatty():
        for index, metrics in enumerate(results):
            print(f"{stage} (loader {index}): {json.dumps(metrics)}")  # noqa: T201  verbose=True asks for it
        return
    from rich.console import Console  # late: only a terminal needs it
    from rich.table import Table

    table = Table(title=stage)
    table.add_column("metric")
    for index in range(len(results)):
        table.add_column("value" if len(results) == 1 else f"loader {index}", justify="right")
    for name in dict.fromkeys(name for metrics in results for name in metrics):
        table.add_row(name, *(f"{metrics[name]:.6g}" if name in metrics else "" for metrics in results))
    Console().print(table)
