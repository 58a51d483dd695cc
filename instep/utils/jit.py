"""Access of `torch.jit` to modules that have no Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _NoTrainer:
    """Stand-in for the Trainer: `torch.jit` reads every property of a module, and some need a Trainer."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextmanager
def readable_by_jit(module: nn.Module) -> Iterator[None]:
    """Allow `torch.jit` to read all attributes of a module and its submodules, also without a Trainer."""
    alone: list[Any] = [part for part in module.modules() if vars(part).get("_trainer", part) is None]
    for part in alone:
        part._trainer = _NoTrainer()
    try:
        yield
    finally:
        for part in alone:
            part._trainer = None
