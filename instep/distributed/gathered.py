"""`gather_in_order`: gathers outputs of all ranks, such as predictions, in the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from instep.distributed import gather_object
from instep.distributed.nested import map_leaves
from instep.state import PartialState

_AT_ONCE = 32  # number of batches in one message between ranks


def gather_in_order(outputs: Sequence[Sequence[Any]], data_rank: int) -> list[list[Any]]:
    """Return the outputs of all ranks on every rank: batch by batch, each batch in rank order. Collective.

    Args:
        outputs: for each loader, this rank's outputs by batch, on the CPU. They must be picklable.
        data_rank: index of the part of the data that this rank read. If several ranks read the same part, only the
            first rank's outputs are used.

    Returns:
        For each loader, the outputs for all parts of the data.
    """
    readers: list[int] = gather_object(data_rank)
    order = [readers.index(part) for part in sorted(set(readers))]
    reads = readers.index(data_rank) == PartialState().process_index
    return [_of_loader(kept if reads else (), order) for kept in outputs]


def _of_loader(kept: Sequence[Any], order: Sequence[int]) -> list[Any]:
    mine, gathered = [map_leaves(_alone, batch) for batch in kept], []
    for start in range(0, max(gather_object(len(mine))), _AT_ONCE):
        parts = gather_object((mine[start : start + _AT_ONCE],))
        for number in range(_AT_ONCE):
            gathered += [batches[number] for rank in order if number < len(batches := parts[rank][0])]
    return gathered


def _alone(leaf: Any) -> Any:
    """Copy a tensor that is a view, since pickling a view would include the storage of the whole tensor.

    Any other tensor or value is returned unchanged.
    """
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf
    return leaf
