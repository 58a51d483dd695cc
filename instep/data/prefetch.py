"""The move of batches to a device; on CUDA a copy runs while the device still computes the step before.

The host is ahead of the device: when it asks for the next batch the device is busy with the previous step. The copy
goes to a side stream, so it does not queue behind that step; the step's own stream waits for the copy alone. No batch
is read ahead for this, so positions, random numbers and `share` are what they are without it.
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
    """Give the source's batches, each through the stages that bring it to the device.

    Args:
        source: batches on the host.
        stages: what is done to a batch, in this order; none where it stays as it is. On CUDA they run on a side stream.
        device: where the batches go.
        after: changes the moved batch, on the step's own stream.
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
    """Give the source's batches on a CUDA device.

    Args:
        source: batches on the host; copies overlap with computation from pinned memory only.
        transfer: moves a batch, with `non_blocking=True`; run on the side stream, so it must not touch what the step
            writes, such as parameters. A batch of other things than tensors, numbers and texts is moved on the step's
            stream, since the allocator cannot be told who uses the tensors within them; so is one that has tensors on
            the device already, which that stream may still compute.
        device: the CUDA device; None for the current one.
        after: changes the moved batch, on the step's own stream.

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
                    leaf.record_stream(current)  # otherwise the next copy could reuse its memory too early
        else:
            moved = transfer(batch)
        yield moved if after is None else after(moved)


_PLAIN = (int, float, complex, str, bytes, type(None))


def _on_host(leaf: Any) -> bool:
    return isinstance(leaf, _PLAIN) or (isinstance(leaf, torch.Tensor) and not leaf.is_cuda)
