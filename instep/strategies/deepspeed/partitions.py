"""`Partition`: the part of a parameter that this rank holds, and its position in DeepSpeed's flat tensors.

This file is the only one that reads the private attributes of DeepSpeed's optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.checkpoint.tensors import Shard, StoredTensor


@dataclass(frozen=True)
class Partition:
    """A contiguous part of a parameter's elements, which DeepSpeed stores in a flat tensor.

    Args:
        shape: shape of the whole parameter.
        begin: index of the part's first element in the flattened parameter.
        count: number of the part's elements.
        flat: flat tensor with the float32 weights of many parameters. This tensor is also the key in the optimizer's
            `state`.
        offset: index of the part's first element in `flat`.
        fetch: with offloading to a disk: function that takes the name of an entry of the optimizer's state and reads
            this entry. With None instead of a name, it reads the float32 weights.
        store: with offloading to a disk: function that overwrites the float32 weights.
        at_hand: function that returns a context in which `flat` and its optimizer state are in memory; at its end they
            are written back to the disk.
    """

    shape: tuple[int, ...]
    begin: int
    count: int
    flat: Tensor
    offset: int
    fetch: Callable[[str | None], Tensor] | None = None
    store: Callable[[Tensor], None] | None = None
    at_hand: Callable[[], AbstractContextManager[Any]] = nullcontext

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of a flat tensor with the same layout as `flat`, such as an optimizer state."""
        return tensor.detach().narrow(0, self.offset, self.count)

    def weights(self) -> Tensor:
        """Return this part of the float32 weights."""
        return self.of(self.flat) if self.fetch is None else self.fetch(None)[: self.count]

    def set_weights(self, value: Tensor) -> None:
        """Overwrite this part of the float32 weights."""
        if self.store is None:
            self.of(self.flat).copy_(value)
        else:
            self.store(value)

    def shard(self, run: Tensor) -> Shard:
        """Return the values `run` of this part's elements as a `Shard`, which a checkpoint can store."""
        return Shard(run, self.shape, (self.begin,), flat=True)


def is_cut(parameter: Tensor) -> bool:
    """Return True if ZeRO stage 3 has sharded a parameter, which then has elements only while it is gathered."""
    return hasattr(parameter, "ds_tensor")


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, also if it is sharded."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def cut_part(parameter: Any) -> Partition:
    """Return this rank's part of a parameter that stage 3 has sharded, in the dtype of the forward.

    Without an optimizer DeepSpeed makes no float32 weights, so this part has the rank's only values of the parameter.
    """
    size = parameter.ds_tensor.ds_numel
    begin = min(dist.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    count = max(min(size, parameter.ds_numel - begin), 0)
    return Partition(shape_of(parameter), begin, count, parameter.ds_tensor, 0)


def find_parts(zero: Any, optimizer: Optimizer) -> dict[Tensor, Partition]:
    """Return a dict from each parameter to the part of it whose float32 weights and optimizer state this rank holds.

    Args:
        zero: DeepSpeed's wrapper of the optimizer.
        optimizer: the user's optimizer.
    """
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return {p: part for group in zero.fp16_groups for p in group if (part := _stage_3(zero, p)).count}
    groups = getattr(zero, "bit16_groups", None) or getattr(zero, "bf16_groups", [])
    parts: dict[Tensor, Partition] = {}
    for group, parameters in enumerate(groups):
        flat = optimizer.param_groups[group]["params"][0]
        for p in parameters:
            mapping = p._hp_mapping
            if mapping is not None:
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                parts[p] = Partition(shape_of(p), here.start, here.numel, flat, there.start)
    return parts


def _stage_3(zero: Any, parameter: Any) -> Partition:
    group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
    cut, flat = cut_part(parameter), zero.fp32_partitioned_groups_flat[group]
    if not zero._swappable_optimizer_subgroup(group):
        return Partition(cut.shape, cut.begin, cut.count, flat, offset)

    def fetch(key: str | None) -> Tensor:
        return zero.get_local_fp32_param(parameter, key).detach().clone()

    def store(value: Tensor) -> None:
        padded = value.new_zeros(parameter.ds_tensor.ds_numel)
        padded[: value.numel()] = value
        zero.set_local_hp_param(padded, parameter)

    @contextmanager
    def at_hand() -> Iterator[None]:
        zero._optimizer_states_and_gradient_swap_in(group)
        yield
        zero._optimizer_states_and_gradient_swap_out(group)  # this call also makes DeepSpeed register new state tensors

    return Partition(cut.shape, cut.begin, cut.count, flat, offset, fetch, store, at_hand)


def write_cut_weights(zero: Any, parts: Mapping[Tensor, Partition]) -> None:
    """Copy the float32 weights of stage 3, which instep has changed, to the weights of the forward. Collective."""
    for p, part in parts.items():
        parameter: Any = p
        if parameter.data.numel():  # shard the parameter again, since DeepSpeed keeps small ones gathered
            parameter.partition()
        cut = cut_part(parameter)
        cut.of(cut.flat).copy_(part.weights())
    kept = list(getattr(zero, "persistent_parameters", ()))
    if kept:
        kept[0].all_gather(kept)


def take_run(value: Tensor | StoredTensor, begin: int, count: int) -> Tensor:
    """Return `count` elements of a flattened tensor from `begin` on; read only the needed rows of a stored tensor."""
    if isinstance(value, Tensor):
        return value.reshape(-1)[begin : begin + count]
    shape = tuple(value.shape)
    if count == 0 or not shape:
        return value.read().reshape(-1)[begin : begin + count]
    row = math.prod(shape[1:])
    first, last = begin // row, -(-(begin + count) // row)
    rows = value.read((slice(first, last), *(slice(0, size) for size in shape[1:])))
    return rows.reshape(-1)[begin - first * row :][:count]


def held_gradients(zero: Any) -> list[Tensor]:
    """Return this rank's part of the reduced gradients, before an optimizer step."""
    held: list[Tensor] = []
    for group in (getattr(zero, "averaged_gradients", None) or {}).values():
        held += [tensor for tensor in group or () if isinstance(tensor, Tensor)]
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        flats = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
        held += [flat.grad for flat in flats if flat.grad is not None]
    return held


def drop_gradients(zero: Any) -> None:
    """Delete accumulated gradients for which there was no optimizer step."""
    if hasattr(zero, "_overflow_clean_up"):
        zero._overflow_clean_up(zero.loss_scale)
        return
    zero.micro_step_id = -1
    zero.zero_grad(set_to_none=True)
    if hasattr(zero, "_release_preflattened_grad_buffers"):
        zero._release_preflattened_grad_buffers()
    if getattr(zero, "cpu_offload", False):
        zero.reset_cpu_buffers()
    for kept in (getattr(zero, "averaged_gradients", {}), getattr(zero, "all_grad_tensors", {})):
        kept.update(dict.fromkeys(kept))


def scaler_state(zero: Any) -> dict[str, Any]:
    """Return the state of DeepSpeed's loss scaler as JSON values."""
    scaler = getattr(zero, "loss_scaler", None)
    return (
        {key: value for key, value in vars(scaler).items() if isinstance(value, bool | int | float)} if scaler else {}
    )


def load_scaler_state(zero: Any, state: Mapping[str, Any]) -> None:
    """Load a result of `scaler_state` into DeepSpeed's loss scaler."""
    scaler = getattr(zero, "loss_scaler", None)
    for key, value in state.items():
        if scaler is not None and key in vars(scaler):
            setattr(scaler, key, value)


def cast_parameters(module: nn.Module, dtype: Any) -> None:
    """Cast floating-point parameters to a dtype in place; buffers keep their dtypes, as in DeepSpeed."""
    for p in module.parameters():
        if p.is_floating_point() and not is_cut(p):
            p.data = p.data.to(dtype)
