"""Batches copied to a GPU while it still runs the step before.

The host is ahead of the device: when it asks for the next batch the device is busy with the previous step. The copy
goes to a side stream, so it does not queue behind that step; the step's own stream waits for the copy alone. No batch
is read ahead for this, so positions, random numbers and `is_last` are what they are without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from instep.distributed.nested import iter_leaves


def prefetch(
    source: Iterable[Any],
    transfer: Callable[[Any], Any],
    device: torch.device | None = None,
    after: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """The source's batches on a CUDA device.

    Args:
        source: batches on the host; copies overlap with computation from pinned memory only.
        transfer: moves a batch, with `non_blocking=True`; run on the side stream, so it must not touch what the step
            writes, such as parameters. A batch of other things than tensors, numbers and texts is moved on the step's
            stream, since the allocator cannot be told who uses the tensors within them.
        device: the CUDA device; None for the current one.
        after: changes the moved batch, on the step's own stream.

    Example:
        >>> for batch in prefetch(loader, lambda batch: batch.to("cuda", non_blocking=True)):  # doctest: +SKIP
        ...     step(batch)
    """
    side = torch.cuda.Stream(device)
    for batch in source:
        current = torch.cuda.current_stream(device)
        if all(isinstance(leaf, _PLAIN) for _, leaf in iter_leaves(batch)):
            with torch.cuda.stream(side):
                moved = transfer(batch)
            current.wait_stream(side)
            for _, leaf in iter_leaves(moved):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    leaf.record_stream(current)  # else the next copy could get its memory too early
        else:
            moved = transfer(batch)
        yield moved if after is None else after(moved)


_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None))
