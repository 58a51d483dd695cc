"""From the loader to the device: the three transfer hooks, the precision's dtype, and the move itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from instep.data import DataModule
from instep.distributed import send_to_device
from instep.strategies import Precision
from instep.trainer.hooks import ModuleHooks, is_overridden

Transfer = Callable[[Any], Any]

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batch_transfer(
    module: ModuleHooks, datamodule: DataModule | None, device: torch.device, precision: Precision, dataloader_idx: int
) -> Transfer | None:
    """What a batch goes through before its step, or None where there is nothing to do.

    Args:
        module: its hooks run unless the datamodule overrides one of the three.
        datamodule: or None.
        device: where batches go.
        precision: may convert floating tensors.
        dataloader_idx: which loader the batches come from, for the hooks.
    """

    def own(name: str) -> Callable[..., Any] | None:
        if datamodule is not None and any(is_overridden(datamodule, hook, DataModule) for hook in HOOKS):
            return getattr(datamodule, name) if is_overridden(datamodule, name, DataModule) else None
        return getattr(module, name) if is_overridden(module, name, ModuleHooks) else None

    stages: list[Transfer] = []
    before, move, after = (own(name) for name in HOOKS)
    if before is not None:
        stages.append(lambda batch: before(batch, dataloader_idx))
    convert = precision.input_converter()
    if convert is not None:
        stages.append(convert)
    if move is not None:
        stages.append(lambda batch: move(batch, device, dataloader_idx))
    elif device.type != "cpu":
        stages.append(lambda batch: send_to_device(batch, device, non_blocking=True))
    if after is not None:
        stages.append(lambda batch: after(batch, dataloader_idx))

    if not stages:
        return None
    if len(stages) == 1:
        return stages[0]

    def through(batch: Any) -> Any:
        for stage in stages:
            batch = stage(batch)
        return batch

    return through
