"""An object that stands for an optimizer: a step of its own, everything else forwarded."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class OptimizerProxy:
    """Forwards attributes to an optimizer, and passes for it: `isinstance(proxy, torch.optim.Adam)` holds.

    So a scheduler can be made with either, and code that looks at `param_groups` need not know.

    Args:
        optimizer: what it stands for.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: while being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
