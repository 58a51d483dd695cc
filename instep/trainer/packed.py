"""Logged scalars on their way from the device to the host, in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PackedCopy:
    """Scalars on their way to the host: one stacked transfer per dtype and device, not waited for on a GPU.

    Args:
        values: 0-dim tensors, and numbers, which pass through.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = list(values)
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, value in enumerate(self._values):
            if isinstance(value, Tensor):
                spread: Any = value
                if hasattr(spread, "full_tensor"):  # a DTensor: several ranks computed it
                    value = self._values[i] = spread.full_tensor()
                groups.setdefault((value.dtype, value.device), []).append(i)
        self._copies: list[tuple[list[int], Tensor]] = []
        self._event: torch.cuda.Event | None = None
        for (_, device), places in groups.items():
            packed = torch.stack([self._values[i] for i in places])
            if device.type == "cuda":
                packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(device))
            self._copies.append((places, packed))

    @property
    def ready(self) -> bool:
        """Whether `floats` returns without waiting."""
        return self._event is None or self._event.query()

    def floats(self) -> list[float]:
        """The values in their order; waits for the transfer."""
        if self._event is not None:
            self._event.synchronize()
        for places, packed in self._copies:
            for i, value in zip(places, packed.tolist(), strict=True):
                self._values[i] = value
        self._copies = []
        return [float(value) for value in self._values]
