"""Helpers to save and load DTensors, torch's tensors that are sharded over the ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from instep.checkpoint.tensors import Shard, StoredTensor
from instep.distributed.nested import map_leaves
from instep.errors import UnsavableStateError
from instep.utils.optimizer_state import whole


def part_to_write(tensor: Tensor, first: bool, mesh: DeviceMesh | None = None) -> Tensor | Shard | None:
    """Return the part of a tensor that this rank writes into a checkpoint. Local.

    Args:
        tensor: a DTensor, or a plain tensor that is the same on all ranks.
        first: whether this rank is the one that writes plain tensors.
        mesh: device mesh of all processes. A DTensor that uses only some dimensions of this mesh has copies along the
            others, of which the first one is written. Along `pp`, ranks have different weights and not copies.

    Returns:
        This rank's part; None if the rank has no elements, or if another rank writes the same elements.

    Raises:
        UnsavableStateError: the part is not a rectangular box of the tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor if first else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    if any(
        at and isinstance(placement, Replicate) for at, placement in zip(coordinate, tensor.placements, strict=True)
    ):
        return None
    named = tensor.device_mesh.mesh_dim_names or ()
    names = () if mesh is None else mesh.mesh_dim_names or ()
    # Let only the first of the ranks that hold the same box write it. They are known only if the dimension names of the
    # DTensor's mesh are names of `mesh`. With a user's own mesh, several ranks may write a box, and a reader uses one.
    if mesh is not None and named and set(named) <= set(names):
        others = set(names) - {*named, "pp"}
        if any(mesh.get_local_rank(name) for name in others):
            return None
    shape, offsets = box_of(tensor)
    local = tensor._local_tensor.detach()
    if shape != tuple(local.shape):
        raise UnsavableStateError(
            f"a tensor of shape {tuple(tensor.shape)} with the placements {tensor.placements} on a mesh of shape "
            f"{tuple(tensor.device_mesh.shape)} is held in a part of shape {tuple(local.shape)} where {shape} was "
            "expected, so its place is not known. Choose sizes that divide the tensor's."
        )
    if shape == tuple(tensor.shape):
        return local
    return Shard(local, tuple(tensor.shape), offsets) if local.numel() else None


def parts_to_write(tree: Any, first: bool, mesh: DeviceMesh | None = None) -> Any:
    """Return the parts of a state that this rank writes; dict entries that another rank writes are left out. Local.

    Args:
        tree: dicts, lists and tuples of tensors and other values; every rank writes values that are not tensors.
        first: whether this rank is the one that writes plain tensors.
        mesh: device mesh of all processes; see `part_to_write`.
    """
    if isinstance(tree, Tensor):
        return part_to_write(tree, first, mesh)
    if isinstance(tree, Mapping):
        kept = ((key, value, parts_to_write(value, first, mesh)) for key, value in tree.items())
        return {key: part for key, value, part in kept if part is not None or value is None}
    if type(tree) in (list, tuple):
        return type(tree)([parts_to_write(value, first, mesh) for value in tree])
    return tree


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a DTensor, and the index of its first element in each dimension."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offsets)


def take_part(value: Tensor | StoredTensor, like: Tensor, device: torch.device | None = None) -> Tensor:
    """Shard a whole tensor like another tensor; only this rank's part of it is read. Local.

    Args:
        value: the whole tensor, with the shape of `like`.
        like: a DTensor, or a plain tensor; for a plain tensor, all of `value` is returned.
        device: device of the part of a DTensor. None: the device of `like`.

    Returns:
        A tensor with the dtype of `value`: a DTensor if `like` is a DTensor.
    """
    if not isinstance(like, DTensor):
        return whole(value)
    shape, offsets = box_of(like)
    box = tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))
    if 0 in shape:
        local = torch.empty(shape, dtype=value.dtype)
    else:
        local = value[box] if isinstance(value, Tensor) else value.read(box)
    return _distributed(local, like, like.placements, device)


def with_local(local: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor that is sharded like `like`, with `local` as this rank's part.

    If `like` is a plain tensor, return `local` itself.
    """
    return _distributed(local, like, like.placements) if isinstance(like, DTensor) else local


def take_parts(tree: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Shard the whole state of an optimizer like its parameters. Local.

    Args:
        tree: state with whole tensors, in the form of `utils/optimizer_state.py`.
        parameters: parameters of the optimizer by canonical name. State of other parameters, or of parameters that had
            another shape, is returned unchanged.
    """

    def fits(name: str) -> bool:
        return name in parameters and list(tree["shapes"].get(name, ())) == list(parameters[name].shape)

    cut = {
        name: {key: take_state(value, parameters[name]) for key, value in values.items()} if fits(name) else values
        for name, values in tree["state"].items()
    }
    rest = {key: map_leaves(whole, value) for key, value in tree.items() if key != "state"}
    return {**rest, "state": cut}


def take_state(value: Any, parameter: Tensor) -> Any:
    """Shard one value of a parameter's optimizer state like the parameter. Local."""
    if isinstance(value, list | tuple):  # L-BFGS has lists of tensors in its state
        return type(value)([take_state(one, parameter) for one in value])
    if not isinstance(parameter, DTensor) or not getattr(value, "shape", ()):
        return whole(value)
    if value.shape == parameter.shape:
        return take_part(value, parameter)
    # A state tensor that is not of the parameter's shape (such as a factor of Adafactor) is whole on every rank.
    return _distributed(whole(value), parameter, [Replicate()] * parameter.device_mesh.ndim)


def gather_whole(value: Any) -> Any:
    """Gather a DTensor to a plain tensor on every rank, on the mesh's device; return any other value unchanged.

    Collective: all ranks call it.
    """
    if not isinstance(value, DTensor):
        return value
    kind = value.device_mesh.device_type
    there: Any = value if value.device.type == kind else value.to(kind)  # an offloaded tensor cannot be sent
    return there.full_tensor()


def _distributed(local: Tensor, like: DTensor, placements: Any, device: torch.device | None = None) -> DTensor:
    same = tuple(placements) == tuple(like.placements)
    where = {"shape": like.shape, "stride": like.stride()} if same else {}
    local = local.to(device or like.device)
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, **where)
