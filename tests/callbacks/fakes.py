"""A trainer with the attributes that callbacks read, and nothing behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.optim import Optimizer

from instep.loggers import Logger
from instep.trainer.context import Position, TrainerFn, TrainerState


@dataclass
class FakeProgress:
    stage: str | None = "train"
    batch: int = 0
    total: int | None = 100
    epoch: int = 0
    dataloader_idx: int = 0
    outer_batch: int = 0
    outer_total: int | None = None


@dataclass
class FakeSchedulerConfig:
    scheduler: Any
    name: str | None = None
    interval: str = "epoch"


@dataclass
class FakeLogger:
    records: list[tuple[dict[str, float], int]] = field(default_factory=list)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.records.append((dict(metrics), step))


@dataclass
class FakeMetrics:
    callback: dict[str, float] = field(default_factory=dict)

    def warn_of_training(self, name: str, reader: str) -> None:
        """Warn of nothing: every value here is of its own stage."""


@dataclass
class FakeTrainer:
    metrics: FakeMetrics = field(default_factory=FakeMetrics)
    callback_metrics: dict[str, Any] = field(default_factory=dict)
    progress_bar_metrics: dict[str, Any] = field(default_factory=dict)
    logged_metrics: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    progress: FakeProgress = field(default_factory=FakeProgress)
    position: Position = field(default_factory=Position)
    global_step: int = 0
    current_epoch: int = 0
    global_rank: int = 0
    world_size: int = 1
    max_epochs: int | None = 2
    max_steps: int = -1
    fast_dev_run: bool | int = False
    state: TrainerState = field(default_factory=lambda: TrainerState(fn=TrainerFn.FITTING))
    sanity_checking: bool = False
    val_check_interval: float | int | timedelta = 1.0
    check_val_every_n_epoch: int | None = 1
    enable_validation: bool = True
    log_every_n_steps: int = 50
    optimizers: list[Optimizer] = field(default_factory=list)
    lr_scheduler_configs: list[FakeSchedulerConfig] = field(default_factory=list)
    loggers: list[Any] = field(default_factory=lambda: [FakeLogger()])
    triggers: list[tuple[str, str]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def set_trigger(self, name: str, reason: str = "") -> None:
        self.triggers.append((name, reason))

    def print(self, *values: object) -> None:
        self.printed.append(" ".join(map(str, values)))


class RecordingLogger(Logger):
    """A logger whose rows are in a list, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def of(self, name: str) -> dict[int, float]:
        """The values of one name, by step."""
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}
