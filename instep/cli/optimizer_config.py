"""Optimizers and learning-rate schedulers that a configuration chose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from instep.trainer import TrainModule

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]


@dataclass
class LRSchedulerOptions:
    """When a configured learning-rate scheduler steps.

    Args:
        interval: "step", counted in optimizer steps, or "epoch"; by default "step" for OneCycleLR, else "epoch".
        frequency: it steps every so many intervals.
        monitor: the logged metric that ReduceLROnPlateau needs.
        strict: whether a missing metric is an error, or a warning and no step.
    """

    interval: Literal["step", "epoch"] | None = None
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True

    def of(self, scheduler: LRScheduler) -> dict[str, Any]:
        """The scheduler with these options, as `configure_optimizers` returns it."""
        interval = self.interval or ("step" if isinstance(scheduler, OneCycleLR) else "epoch")
        return {**asdict(self), "interval": interval, "scheduler": scheduler}


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Build an object from a class's path and arguments; imports what the path names, so never a stranger's.

    Args:
        args: its first argument, or a tuple of them, such as the parameters for an optimizer.
        init: `{"class_path": ..., "init_args": ...}`.

    Example:
        >>> import torch
        >>> init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
        >>> instantiate_class(torch.nn.Linear(1, 1).parameters(), init).defaults["lr"]
        0.1
    """
    first = args if isinstance(args, tuple) else (args,)
    return _named(init)(*first, **init.get("init_args", {}))


def with_class_path(cls: type, init_args: Any) -> dict[str, Any]:
    """A class and its arguments, as `instantiate_class` takes them."""
    given = init_args.as_dict() if hasattr(init_args, "as_dict") else dict(init_args or {})
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": given}


def with_length(init: Mapping[str, Any], module: TrainModule) -> dict[str, Any]:
    """A scheduler to build: OneCycleLR without a length is as long as the run."""
    cls, given = _named(init), dict(init.get("init_args", {}))
    length = ("total_steps", "epochs", "steps_per_epoch")
    if inspect.isclass(cls) and issubclass(cls, OneCycleLR) and all(given.get(name) is None for name in length):
        given["total_steps"] = int(module.trainer.estimated_stepping_batches)
    return {**init, "init_args": given}


def _named(init: Mapping[str, Any]) -> Any:
    module, _, name = init["class_path"].rpartition(".")
    return getattr(import_module(module), name)
