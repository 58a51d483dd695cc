"""A strategy that trains like averaged gradients, and keeps and takes its state in parts of what each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.checkpoint import Shard
from instep.distributed import all_reduce_
from instep.state import PartialState
from instep.strategies import Precision, Strategy
from instep.strategies.gradients import Gradients, parameters_of
from instep.utils.optimizer_state import load_optimizer_state


class Averaged(Gradients):
    """Gradients that are averaged over ranks right before the optimizer's step."""

    def step(self, optimizer: Any, closure: Any = None, **kwargs: Any) -> None:
        if dist.is_initialized():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    all_reduce_(parameter.grad, "mean")
        super().step(optimizer, closure, **kwargs)


class Parts(Strategy):
    """Every rank has the whole module; it writes its share of each tensor, and reads no more than that.

    Args:
        flat: whether the shares are runs of elements; else rows, of tensors with two dimensions columns.
    """

    name = "parts"
    multi_process = True
    sharded = True
    gradients_class = Averaged

    def __init__(self, flat: bool = False) -> None:
        self.flat = flat

    def local_shards(self, tree: Any) -> Any:
        here = PartialState()
        return cut(tree, here.process_index, here.num_processes, self.flat)

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        return super().load_model_state(_put_together(state), strict)

    def load_optimizer_state(self, optimizer: Any, tree: Mapping[str, Any], strict: bool = True) -> list[str]:
        return load_optimizer_state(self.module, optimizer, _put_together(tree), strict)


class SameData(Parts):
    """All ranks read all of the data, and the values of one of them count.

    Args:
        counting: that rank.
    """

    name = "same_data"

    def __init__(self, counting: int = 0) -> None:
        super().__init__()
        self.counting = counting

    def connect(self, device: torch.device, precision: Precision) -> None:
        super().connect(device, precision)
        self.data_rank, self.data_world_size = 0, 1
        self.contributes = PartialState().process_index == self.counting


def cut(tree: Any, rank: int, world_size: int, flat: bool = False) -> Any:
    """What a rank writes of a state: a share of each tensor with dimensions, and all others from rank 0."""
    if isinstance(tree, dict):
        parts = {key: cut(value, rank, world_size, flat) for key, value in tree.items()}
        return {key: part for key, part in parts.items() if part is not None or tree[key] is None}
    if isinstance(tree, list):
        return [cut(value, rank, world_size, flat) for value in tree]
    if not isinstance(tree, Tensor):
        return tree
    if tree.ndim == 0:
        return tree if rank == 0 else None
    whole = tree.reshape(-1) if flat else tree
    dim = whole.ndim - 1
    share = -(-whole.shape[dim] // world_size)
    begin = min(rank * share, whole.shape[dim])
    size = min(share, whole.shape[dim] - begin)
    offsets = [0] * whole.ndim
    offsets[dim] = begin
    return Shard(whole.narrow(dim, begin, size), tuple(tree.shape), tuple(offsets), flat)


def _put_together(tree: Any) -> Any:
    """Every stored tensor, of which this rank reads its part; the others give theirs."""
    if isinstance(tree, Mapping):
        return {key: _put_together(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_put_together(value) for value in tree]
    if isinstance(tree, Tensor) or not hasattr(tree, "read"):
        return tree
    if not tree.shape or not dist.is_initialized():
        return tree.read()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = -(-tree.shape[-1] // world_size)
    begin = min(rank * share, tree.shape[-1])
    box = [slice(0, size) for size in tree.shape]
    box[-1] = slice(begin, min(begin + share, tree.shape[-1]))
    mine = tree.read(tuple(box))
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, mine)
    return torch.cat(every, -1)
