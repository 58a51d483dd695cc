"""Modules that were built on the meta device, made real one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Materializer:
    """Gives modules memory and values, in the order in which it gets them.

    A module's own weights and buffers come from its `reset_parameters` (or `_reset_parameters`), as torch's layers
    have it, drawn on the device. A tied weight is drawn by its first holder; so are an ordinary module's.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.without_values: set[str] = set()
        """Names of weights and buffers that nothing gave values to: they are nan until they are loaded."""
        self._made: dict[Tensor, Tensor] = {}

    def make(self, module: nn.Module, name: str) -> None:
        """Make a module's own weights and buffers real, not those of its parts.

        Args:
            module: nothing is done where it is real already.
            name: in the whole module.
        """
        tied: list[tuple[Tensor, Tensor]] = []
        fresh: list[str] = []
        for holder in (module._parameters, module._buffers):
            entries: dict[str, Any] = holder
            for key, value in entries.items():
                if value is None or not value.is_meta:
                    continue
                made = self._made.get(value)
                if made is None:
                    made = self._made[value] = _empty_like(value, self.device)
                    fresh.append(key)
                else:
                    tied.append((made, made.detach().clone()))
                entries[key] = made
        if not fresh and not tied:
            return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            self.without_values |= {f"{name}.{key}" if name else key for key in fresh}
            return
        with torch.no_grad():
            reset()
            for made, first in tied:
                made.copy_(first)


def _empty_like(value: Tensor, device: torch.device) -> Tensor:
    made: Any = torch.empty_like(value, device=device)
    if made.is_floating_point():
        made.fill_(torch.nan)
    if isinstance(value, nn.Parameter):
        made = nn.Parameter(made, requires_grad=value.requires_grad)
        made.__dict__.update(value.__dict__)  # attributes that users put on it
    return made
