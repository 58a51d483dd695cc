"""Batch normalisation over the batch of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from instep.errors import SettingError
from instep.state import PartialState

_DEVICES = ("cuda", "xpu", "hpu")  # of torch.nn.SyncBatchNorm


def check_sync_batchnorm(device_type: str) -> None:
    """Refuse a kind of device on which torch has no SyncBatchNorm.

    Raises:
        SettingError: it is one.
    """
    if device_type not in _DEVICES:
        raise SettingError(
            f"sync_batchnorm=True: torch's SyncBatchNorm works on {', '.join(_DEVICES)}, and this is {device_type}. "
            "Leave it out (each rank then normalises by its own batch), or use layers that do not look at the batch, "
            "such as GroupNorm or LayerNorm.",
            field="sync_batchnorm",
            got=True,
        )


def sync_batchnorm(module: nn.Module, device: torch.device, group: Any = None) -> None:
    """Make every BatchNorm layer of a module a SyncBatchNorm, in place; nothing with one process.

    Names, parameters and running statistics stay.

    Args:
        module: not a BatchNorm itself.
        device: where it trains.
        group: the process group of the ranks whose batches are parts of one; None for all.

    Raises:
        SettingError: the device has no SyncBatchNorm.
    """
    if PartialState().num_processes > 1:
        check_sync_batchnorm(device.type)
        nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
