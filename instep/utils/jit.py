"""`readable_by_jit`: let `torch.jit` read the properties of a TrainModule that has no Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _NoTrainer:
    """Placeholder for a module's Trainer, since `torch.jit` reads every property, and some need a Trainer."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextmanager
def readable_by_jit(module: nn.Module) -> Iterator[None]:
    """In the `with` block, let `torch.jit` read all properties of a module and its submodules without a Trainer."""
    alone: list[Any] = [part for part in module.modules() if vars(part).get("_trainer", part) is None]
    for part in alone:
        part._trainer = _NoTrainer()
    try:
        yield
    finally:
        for part in alone:
            part._trainer = None
