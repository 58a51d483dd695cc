"""Moving batches to a device. On CUDA a copy runs while the device still computes the previous step.

The host is ahead of the device: when the host requests the next batch, the device is still busy with the previous step.
The copy runs on a side stream, so it does not wait for that step. The main stream waits only for the copy. No batch is
read ahead, so positions, random numbers and `share` are the same as without a side stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from instep.distributed.nested import iter_leaves

Stage: TypeAlias = Callable[[Any], Any]


def batches_through(
    source: Iterable[Any], stages: Sequence[Stage], device: torch.device, after: Stage | None = None
) -> Iterator[Any]:
    """Yield the source's batches, each passed through functions that bring it to the device.

    Args:
        source: batches on the host.
        stages: functions that a batch passes in this order; empty if it is not changed. On CUDA they run on a side
            stream.
        device: device that the batches are moved to.
        after: function that changes the moved batch, on the main stream.
    """
    if device.type == "cuda" and stages:
        return prefetch(source, _chain(stages), device, after=after)
    every = [*stages] if after is None else [*stages, after]
    return map(_chain(every), source) if every else iter(source)


def _chain(stages: Sequence[Stage]) -> Stage:
    if len(stages) == 1:
        return stages[0]

    def through(batch: Any) -> Any:
        for stage in stages:
            batch = stage(batch)
        return batch

    return through


def prefetch(
    source: Iterable[Any],
    transfer: Callable[[Any], Any],
    device: torch.device | None = None,
    after: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Yield the source's batches on a CUDA device.

    Args:
        source: batches on the host. Copies overlap with computation only if the batches are in pinned memory.
        transfer: function that moves a batch with `non_blocking=True`. It runs on the side stream, so it must not use
            values that the step writes, such as parameters. Two kinds of batches are moved on the main stream instead:
            batches with objects other than tensors, numbers and texts, because the allocator cannot learn which stream
            uses tensors inside these objects; and batches with tensors on the device, which the main stream may still
            be computing.
        device: the CUDA device; None for the current one.
        after: function that changes the moved batch, on the main stream.

    Example:
        >>> for batch in prefetch(loader, lambda batch: batch.to("cuda", non_blocking=True)):  # doctest: +SKIP
        ...     step(batch)
    """
    side = torch.cuda.Stream(device)
    for batch in source:
        current = torch.cuda.current_stream(device)
        if all(map(_on_host, (leaf for _, leaf in iter_leaves(batch)))):
            with torch.cuda.stream(side):
                moved = transfer(batch)
            current.wait_stream(side)
            for _, leaf in iter_leaves(moved):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    leaf.record_stream(current)  # without record_stream, the next copy could reuse the memory too early
        else:
            moved = transfer(batch)
        yield moved if after is None else after(moved)


_PLAIN = (int, float, complex, str, bytes, type(None))


def _on_host(leaf: Any) -> bool:
    return isinstance(leaf, _PLAIN) or (isinstance(leaf, torch.Tensor) and not leaf.is_cuda)
