"""The stack of runs. The active run has the precision, strategy and gradient accumulation that are in use now.

A Trainer pushes a run for fit, validate, test and predict and pops it at their end; an Accelerator has one run. The run
on top of the stack is active. The loop writes `run.gradient`; other code reads it through `GradientState`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from instep.errors import SettingError, one_of

MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(slots=True, eq=False)
class GradientRecord:
    """State of gradient accumulation and of the loaders in use.

    The loop writes it; other code reads it through `GradientState`.

    Args:
        num_steps: micro-batches per accumulation window.
        sync_gradients: whether the running micro-batch ends its window, so that gradients are reduced and the optimizer
            steps.
        end_of_dataloader: whether the running micro-batch is the last of the active loader.
        remainder: number of samples, without padding, in the last global batch; -1 if unknown.
        active_dataloader: innermost loader that is iterated now; None outside of loops.
        dataloader_references: all loaders that are iterated now, outermost first.
        adjust_scheduler: whether learning-rate schedules count batches. If True, an optimizer step advances them by the
            number of batches in its window, else by one.
        sync_with_dataloader: whether an accumulation window ends at the end of its loader.
        is_xla_gradients_synced: whether XLA has reduced the gradients of this window.
    """

    num_steps: int = 1
    sync_gradients: bool = True
    end_of_dataloader: bool = False
    remainder: int = -1
    active_dataloader: Any = None
    dataloader_references: list[Any] = field(default_factory=list)
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    is_xla_gradients_synced: bool = False


class Run:
    """Record of one run: one fit, validate, test or predict of a Trainer, or one Accelerator.

    Args:
        name: name of the run in errors, such as "Trainer.fit".
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        plugin: the strategy, with its settings.
        num_steps: micro-batches per accumulation window.

    Attributes:
        gradient: state of gradient accumulation, which only the Trainer or Accelerator of this run writes.

    Example:
        >>> run = push_run(Run("my loop", mixed_precision="bf16", num_steps=4))
        >>> run
        Run('my loop', mixed_precision='bf16', num_steps=4)
        >>> pop_run(run)
    """

    __slots__ = ("gradient", "mixed_precision", "name", "plugin")

    def __init__(self, name: str, mixed_precision: str = "no", plugin: Any = None, num_steps: int = 1) -> None:
        if mixed_precision not in MIXED_PRECISIONS:
            raise one_of("mixed_precision", mixed_precision, MIXED_PRECISIONS)
        if num_steps < 1:
            raise SettingError(f"num_steps={num_steps} must be at least 1", field="num_steps", got=num_steps)
        self.name = name
        self.mixed_precision = mixed_precision
        self.plugin = plugin
        self.gradient = GradientRecord(num_steps)

    def __repr__(self) -> str:
        return f"Run({self.name!r}, mixed_precision={self.mixed_precision!r}, num_steps={self.gradient.num_steps})"


_runs: list[Run] = []


def push_run(run: Run) -> Run:
    """Make a run the active one, and return it.

    Example:
        >>> run = push_run(Run("Trainer.fit", mixed_precision="bf16"))
        >>> try:
        ...     active_run() is run
        ... finally:
        ...     pop_run(run)
        True
    """
    _runs.append(run)
    return run


def pop_run(run: Run) -> None:
    """End a run. If it was the active one, the run that was active before is active again.

    A run that is not the active one, such as that of an Accelerator that is freed inside a fit, is only removed.
    Ending a run twice does nothing.

    Args:
        run: the run that `push_run` returned.

    Example:
        >>> outer, inner = push_run(Run("outer")), push_run(Run("inner"))
        >>> pop_run(inner)
        >>> active_run().name
        'outer'
        >>> pop_run(outer)
    """
    _runs[:] = [other for other in _runs if other is not run]


def active_run() -> Run | None:
    """Return the run that began last and has not ended; None outside of runs.

    Example:
        >>> active_run() is None
        True
    """
    return _runs[-1] if _runs else None


def clear_runs() -> None:
    """End all runs. For tests."""
    _runs.clear()
