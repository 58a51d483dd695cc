"""From the loader to the device: the three transfer hooks, the precision's dtype, and the move itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from instep.data import BatchSource, DataModule
from instep.distributed import send_to_device
from instep.strategies import Precision
from instep.trainer.hooks import ModuleHooks, is_overridden

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def batches_on_device(
    source: BatchSource,
    module: ModuleHooks,
    datamodule: DataModule | None,
    device: torch.device,
    precision: Precision,
    dataloader_idx: int = 0,
) -> Iterator[Any]:
    """The source's batches, each on the device. On CUDA a copy overlaps with the step before.

    Args:
        source: batches on the host.
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

    before, move, after = (own(name) for name in HOOKS)
    stages: list[Callable[[Any], Any]] = []
    if before is not None:
        stages.append(lambda batch: before(batch, dataloader_idx))
    convert = precision.input_converter()
    if convert is not None:
        stages.append(convert)
    if move is not None:
        stages.append(lambda batch: move(batch, device, dataloader_idx))
    elif device.type != "cpu":
        stages.append(lambda batch: send_to_device(batch, device, non_blocking=True))
    last = None if after is None else lambda batch: after(batch, dataloader_idx)
    if device.type == "cuda" and stages:
        from instep.data.prefetch import prefetch  # late: only a GPU run pays for it

        return prefetch(source, _chain(stages), device, after=last)
    if last is not None:
        stages.append(last)
    return map(_chain(stages), source) if stages else iter(source)


def _chain(stages: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    if len(stages) == 1:
        return stages[0]

    def through(batch: Any) -> Any:
        for stage in stages:
            batch = stage(batch)
        return batch

    return through
