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
        cut: list[tuple[dict[str, Any], str, Any]] = []
        for holder in (module._parameters, module._buffers):
            entries: dict[str, Any] = holder
            for key, value in entries.items():
                if value is None or not value.is_meta:
                    continue
                made = self._made.get(value)
                if _is_sharded(value):  # drawn as a whole and cut then: the values are those of one process
                    cut.append((entries, key, value))
                    if made is None:
                        fresh.append(key)
                    made = _empty_like(value, self.device)
                elif made is None:
                    made = self._made[value] = _empty_like(value, self.device)
                    fresh.append(key)
                else:
                    tied.append((made, made.detach().clone()))
                entries[key] = made
        if not (fresh or tied or cut):
            return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            self.without_values |= {f"{name}.{key}" if name else key for key in fresh}
        else:
            with torch.no_grad():
                reset()
                for made, first in tied:
                    made.copy_(first)
        for entries, key, value in cut:
            if value not in self._made:
                from torch.distributed.tensor import distribute_tensor  # late: slow, and the Trainer imports this file

                drawn = distribute_tensor(entries[key].detach(), value.device_mesh, value.placements)
                self._made[value] = _parameter_like(value, drawn)
            entries[key] = self._made[value]


def _is_sharded(value: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing its class."""
    return hasattr(value, "device_mesh")


def _empty_like(value: Tensor, device: torch.device) -> Tensor:
    made = torch.empty(value.shape, dtype=value.dtype, device=device)
    if made.is_floating_point():
        made.fill_(torch.nan)
    return _parameter_like(value, made)


def _parameter_like(value: Tensor, made: Any) -> Any:
    if isinstance(value, nn.Parameter):
        made = nn.Parameter(made, requires_grad=value.requires_grad)
        if not _is_sharded(value):
            made.__dict__.update(value.__dict__)  # attributes that users put on it
    return made
