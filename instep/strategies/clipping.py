"""Gradient clipping and norms for any mix of plain tensors and DTensors on different device meshes.

torch's `clip_grad_norm_` stacks the norms of all gradients, which fails if some gradients are plain tensors and others
are sharded over different meshes. Here each rank sums over its own shards, and each sum is reduced only over the ranks
that hold the other shards of the same parameters. So every element counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def clip_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    skip: Collection[Tensor] = (),
) -> Tensor:
    """Scale gradients in place so that their norm, taken over all of them together, is at most `max_norm`. Collective.

    Args:
        parameters: parameters whose gradients are clipped: DTensors of any meshes, and plain tensors that are the same
            on all ranks. Ranks that hold shards of the same parameters pass these in the same order.
        max_norm: the largest norm that is allowed.
        norm_type: order p of the norm, such as 2.0 or `inf`.
        groups: groups of ranks that hold different parameters, such as the stages of a pipeline.
        skip: parameters that are scaled but not counted, because another rank of `groups` counts them.

    Returns:
        The norm before scaling: a 0-dim plain tensor, the same on all ranks.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_norm_([weight], 1.0)
        tensor(5.)
    """
    parameters = list(parameters)
    total = total_norm(parameters, norm_type, groups=groups, skip=skip)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for (device, _), gradients in _gradients(parameters).items():
        torch._foreach_mul_(gradients, factor.to(device, non_blocking=True))
    return total


def clip_value_(parameters: Iterable[Tensor], value: float) -> None:
    """Clamp every element of the gradients to [-value, value], in place.

    Args:
        parameters: as in `clip_norm_`.
        value: the largest absolute value.
    """
    for gradients in _gradients(parameters).values():
        torch._foreach_clamp_min_(gradients, -value)
        torch._foreach_clamp_max_(gradients, value)


def total_norm(
    parameters: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    skip: Collection[Tensor] = (),
) -> Tensor:
    """Compute the norm of all gradients together; the arguments are those of `clip_norm_`. Collective."""
    skipped = {id(p) for p in skip}
    # Gradients, grouped by the process groups over which they are sharded.
    pending: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {(): []}
    device: torch.device | None = None
    dtype = torch.float32  # sums are computed in float32 or higher
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
        gradient = gradient_of(parameter)
        spread = _groups_of(parameter)
        # Add an entry even if there is no gradient, since all ranks must reduce the same sums.
        here = pending.setdefault(spread, [])
        if device is None or spread:
            device = _collective_device(parameter)
        if gradient is not None and id(parameter) not in skipped:
            here.append(local_part(gradient))
    device = device or torch.device("cpu")
    sums = {spread: _power_sum(gradients, norm_type, dtype).to(device) for spread, gradients in pending.items()}
    op: Any = dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM
    while spreads := [spread for spread in sums if spread]:
        group = spreads[0][0]
        members = [spread for spread in spreads if group in spread]
        stacked = torch.stack([sums.pop(spread) for spread in members])
        dist.all_reduce(stacked, op=op, group=group)
        for spread, value in zip(members, stacked.unbind(), strict=True):
            rest = tuple(other for other in spread if other is not group)
            sums[rest] = _join(sums[rest], value, norm_type) if rest in sums else value
    total = sums[()]
    for group in groups:
        dist.all_reduce(total, op=op, group=group)
    return total if norm_type == inf else total ** (1.0 / norm_type)


def each_norm(parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Compute the norm of each parameter's whole gradient, over the ranks that hold its shards. Collective.

    Args:
        parameters: parameters that all have gradients. Ranks that hold shards of the same parameters pass these in the
            same order.
        norm_type: order p of the norm, such as 2.0 or `inf`.

    Returns:
        Tensor with one float32 norm per parameter, on the device; the host does not wait for it.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> each_norm([weight])
        tensor([5.])
    """
    gradients = [local_part(gradient) for p in parameters if (gradient := gradient_of(p)) is not None]
    device = _collective_device(parameters[0])
    # Replace an empty shard by one zero: its norm is 0 for every order.
    filled = [gradient if gradient.numel() else gradient.new_zeros(1) for gradient in gradients]
    norms = [norm.to(device, torch.float32) for norm in torch._foreach_norm(filled, norm_type)]
    return reduce_shards(torch.stack(norms), parameters, norm_type)


def reduce_shards(values: Tensor, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Combine the norms of shards to norms of whole tensors, over the ranks that hold the shards. Collective.

    Args:
        values: norm of this rank's shard for each parameter, overwritten with the result. With `norm_type` 1.0, these
            may be any values or rows of values, which are summed over all shards.
        parameters: parameters; their meshes give the ranks that hold the other shards.
        norm_type: order p of the norm, such as 2.0 or `inf`.
    """
    spreads: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for place, parameter in enumerate(parameters):
        spreads.setdefault(_groups_of(parameter), []).append(place)
    op: Any = dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM
    for spread, places in spreads.items():
        if spread:
            # Stack single values, since indexing by a list would copy the list to the device.
            chosen = torch.stack([values[place] for place in places])
            part = chosen if norm_type in (inf, 1.0) else chosen**norm_type
            for group in spread:
                dist.all_reduce(part, op=op, group=group)
            part = part if norm_type in (inf, 1.0) else part ** (1.0 / norm_type)
            for place, value in zip(places, part.unbind(), strict=True):
                values[place].copy_(value)
    return values


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient, sharded like the parameter; reduce it if it is a partial sum. Collective."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return gradient


def _groups_of(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which a tensor is sharded; () for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate)
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; return any other tensor unchanged."""
    # The private attribute is used, since autograd would record a call of to_local().
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _collective_device(parameter: Tensor) -> torch.device:
    """Return the device for collectives on a parameter's gradient: the mesh's device, even for offloaded parameters."""
    kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type
    if kind == parameter.device.type:
        return parameter.device
    return torch.device(kind, getattr(torch, kind).current_device())


def _gradients(parameters: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return this rank's part of the parameters' gradients, grouped by device and dtype. Collective."""
    return _by_kind(local_part(gradient) for p in parameters if (gradient := gradient_of(p)) is not None)


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _power_sum(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """Return the sum of |x|^p over all elements x of the tensors, or the largest |x| if p is inf."""
    total: Tensor | None = None
    for group in _by_kind(tensor for tensor in tensors if tensor.numel()).values():
        norms = torch.stack(torch._foreach_norm(group, norm_type, dtype=dtype))
        part = norms.amax() if norm_type == inf else (norms**norm_type).sum()
        total = part if total is None else _join(total, part.to(total.device), norm_type)
    return torch.zeros((), dtype=dtype) if total is None else total


def _join(a: Tensor, b: Tensor, norm_type: float) -> Tensor:
    return torch.maximum(a, b) if norm_type == inf else a + b
