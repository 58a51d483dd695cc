"""`compare_replicas`: compares, by hash, tensors that should be the same on several ranks."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from instep.distributed.objects import gather_object
from instep.state.rank_records import digest_of

_CHUNK = 1 << 24
_LARGE_PRIME = 0x1000003


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor that differs between the ranks that hold it.

    Args:
        name: name of the tensor.
        ranks: ranks whose tensor differs from the majority; all holders if there is no majority.
        holders: all ranks that hold the tensor.
        hosts: host name of each rank in `ranks`.
    """

    name: str
    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    hosts: tuple[str, ...]


def compare_replicas(tensors: Mapping[str, Tensor]) -> list[ReplicaDifference]:
    """Compare tensors by hash between the ranks that hold them. Collective.

    Each rank passes its tensors, in any order; names that only one rank has are not compared. For a DTensor, ranks with
    the same shard are compared. First, ranks send one hash for all tensors with the same shard position. They send
    hashes of single tensors only if the first hashes differ.

    Args:
        tensors: tensors by name, on any device; lazy and meta tensors are left out.

    Returns:
        The tensors that differ, sorted by name; the same list on every rank.

    Example:
        >>> compare_replicas({"weight": torch.ones(2)})  # with a single process
        []
    """
    shards: dict[str, dict[str, int]] = {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            local, shard = _local(tensor)
            if local is not None and not local.is_meta and local.numel():
                shards.setdefault(shard, {})[name] = digest(local)
    told = gather_object({shard: _sum(found) for shard, found in shards.items()})
    seen: dict[str, set[int]] = {}
    for of in told:
        for shard, value in of.items():
            seen.setdefault(shard, set()).add(value)
    if all(len(values) == 1 for values in seen.values()):
        return []
    doubtful = {shard: found for shard, found in shards.items() if len(seen[shard]) > 1}
    return _differences(gather_object((socket.gethostname(), doubtful)))


def digest(tensor: Tensor) -> int:
    """Hash a tensor's bytes to 64 bits.

    On a CPU this is a hash function. On another device, weighted sums over the bytes are computed on the device, so
    that only 8 bytes are copied to the host.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(data.numpy().data)
    return weigh(data)


def weigh(data: Tensor) -> int:
    """Hash bytes to a number, on the device that holds the bytes.

    Args:
        data: uint8 tensor of one dimension.
    """
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        part = data[start : start + _CHUNK].to(torch.int64) + 1
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=data.device)
        total = total * _LARGE_PRIME + (part * weights).sum() * 31 + part.sum()
    return int(total.item())


def _local(tensor: Tensor) -> tuple[Tensor | None, str]:
    """Return this rank's shard of a tensor, and a text that says which shard it is.

    The shard is None for a lazy tensor, for a partial sum, and on a rank outside the tensor's mesh.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return (None if torch.nn.parameter.is_lazy(tensor) else tensor), ""
    if any(placement.is_partial() for placement in placements):
        return None, ""
    mesh = tensor.device_mesh  # type: ignore[attr-defined]  # a DTensor
    where = mesh.get_coordinate()
    if where is None:
        return None, ""
    placed = zip(placements, where, strict=True)
    at = [f"{placement} {index}" for placement, index in placed if not placement.is_replicate()]
    return tensor.to_local(), ", ".join(at)  # type: ignore[attr-defined]


def _sum(found: Mapping[str, int]) -> int:
    return digest_of("\n".join(f"{name} {found[name]}" for name in sorted(found)))


def _differences(told: list[tuple[str, dict[str, dict[str, int]]]]) -> list[ReplicaDifference]:
    held: dict[tuple[str, str], dict[int, int]] = {}
    for rank, (_, shards) in enumerate(told):
        for shard, found in shards.items():
            for name, value in found.items():
                held.setdefault((name, shard), {})[rank] = value
    differences = []
    for (name, shard), by_rank in sorted(held.items()):
        counted = Counter(by_rank.values()).most_common()
        if len(counted) == 1:
            continue
        majority = counted[0][0] if counted[0][1] > counted[1][1] else None
        odd = tuple(rank for rank, value in by_rank.items() if value != majority)
        what = f"{name} ({shard})" if shard else name
        differences.append(ReplicaDifference(what, odd, tuple(by_rank), tuple(told[rank][0] for rank in odd)))
    return differences
