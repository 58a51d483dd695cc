"""Functions on nested data: tensors inside lists, tuples, dicts, other mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from instep.errors import DataError, NotTensorError, ShapeMismatchError


def is_torch_tensor(data: Any) -> bool:
    """Return True if a value is a tensor."""
    return isinstance(data, torch.Tensor)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply a function to every leaf of nested data, and build the same structure from the results.

    Lists, tuples, namedtuples, mappings and dataclasses are structure; every other object is a leaf. The data is not
    changed in place.

    Example:
        >>> map_leaves(lambda leaf: leaf + 1, {"a": [1, 2], "b": (3,)})
        {'a': [2, 3], 'b': (4,)}
    """
    kind = type(data)
    if kind is torch.Tensor:
        return function(data)
    if kind is dict:
        return {key: map_leaves(function, value) for key, value in data.items()}
    if kind is list:
        return [map_leaves(function, value) for value in data]
    if kind is tuple:
        return tuple([map_leaves(function, value) for value in data])
    if isinstance(data, (list, tuple)):
        values = [map_leaves(function, value) for value in data]
        return kind(*values) if hasattr(data, "_fields") else kind(values)
    if isinstance(data, Mapping):
        # Copy, so that a subclass keeps more than its items, such as a default factory or attributes.
        mapping: Any = copy.copy(data)
        for key, value in data.items():
            mapping[key] = map_leaves(function, value)
        return mapping
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        instance = copy.copy(data)
        for field in dataclasses.fields(data):
            # use the `__setattr__` of `object`, since the dataclass may be frozen
            object.__setattr__(instance, field.name, map_leaves(function, getattr(data, field.name)))
        return instance
    return function(data)


def iter_leaves(data: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves, each with its path, such as `['a'][0]`, in the order of `map_leaves`."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from iter_leaves(value, f"{where}[{key!r}]")
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            yield from iter_leaves(value, f"{where}[{index}]")
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            yield from iter_leaves(getattr(data, field.name), f"{where}.{field.name}")
    else:
        yield where, data


def send_to_device(data: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
    """Move every tensor of nested data to a device.

    Values with a method `to` (tensors, packed sequences, tokenizer batches) are moved by this method. Other values stay
    unchanged.

    Args:
        data: nested data; not changed.
        device: device to move to.
        non_blocking: whether the host does not wait for copies from pinned memory.

    Returns:
        The same structure. Tensors that are already on the device are the same objects.

    Example:
        >>> send_to_device({"x": torch.ones(2), "name": "a"}, "cpu")["name"]
        'a'
    """
    kind = type(data)
    if kind is torch.Tensor:
        return data.to(device, non_blocking=non_blocking)
    if kind is dict:
        return {key: send_to_device(value, device, non_blocking) for key, value in data.items()}
    if kind is list:
        return [send_to_device(value, device, non_blocking) for value in data]
    if kind is tuple:
        return tuple([send_to_device(value, device, non_blocking) for value in data])
    if hasattr(data, "to") and not isinstance(data, type):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # the class has a `to` of its own, without the argument non_blocking
            return data.to(device)
    if isinstance(data, (list, tuple, Mapping)) or dataclasses.is_dataclass(data):
        return map_leaves(lambda leaf: send_to_device(leaf, device, non_blocking), data)
    return data


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to every tensor of nested data.

    Args:
        func: function, called as `func(tensor, *args, **kwargs)`.
        data: nested data; not changed.
        *args: passed on to `func`.
        test_type: function that returns True for the leaves to which `func` is applied. Other leaves stay as they are.
        error_on_other_type: whether other leaves raise an error.
        **kwargs: passed on to `func`.

    Returns:
        The same structure.

    Raises:
        TypeError: with `error_on_other_type`, `test_type` returns False for a leaf.

    Example:
        >>> recursively_apply(torch.neg, {"x": torch.tensor(1), "name": "a"})
        {'x': tensor(-1), 'name': 'a'}
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", type(func).__name__)
            raise TypeError(
                f"Unsupported types ({type(leaf)}) passed to `{name}`. Only nested list/tuple/dicts of objects that "
                f"are valid for `{getattr(test_type, '__name__', test_type)}` should be passed."
            )
        return leaf

    return map_leaves(apply, data)


def convert_to_fp32(data: Any) -> Any:
    """Convert the 16-bit floats of nested data to float32.

    Args:
        data: nested data; not changed. All other leaves stay as they are.

    Example:
        >>> convert_to_fp32([torch.ones(1, dtype=torch.bfloat16), 1])
        [tensor([1.]), 1]
    """
    return map_leaves(
        lambda leaf: (
            leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf
        ),
        data,
    )


def listify(data: Any) -> Any:
    """Convert the tensors of nested data to lists of numbers.

    Args:
        data: nested data; not changed. All other leaves stay as they are.

    Example:
        >>> listify({"x": torch.tensor([1, 2])})
        {'x': [1, 2]}
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested data; None if there is no tensor.

    Args:
        data: nested data.

    Example:
        >>> find_device([1, torch.ones(2)])
        device(type='cpu')
    """
    return next((leaf.device for _, leaf in iter_leaves(data) if isinstance(leaf, torch.Tensor)), None)


def pad_input_tensors(data: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad the batch dimension of every tensor with zeros, to a multiple of the number of processes.

    Args:
        data: nested tensors; not changed.
        batch_size: size of the batch, along `dim`.
        num_processes: number of which the size of the batch becomes a multiple.
        dim: the dimension of the batch.

    Returns:
        The same structure. Tensors that are already long enough are the same objects.

    Raises:
        TypeError: a leaf is not a tensor.

    Example:
        >>> pad_input_tensors(torch.ones(3, 2), 3, 2).shape
        torch.Size([4, 2])
    """

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        missing = -batch_size % num_processes
        if not missing:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = missing
        return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, data, error_on_other_type=True)


def find_batch_size(data: Any) -> int | None:
    """Return the size of dimension 0 of the first tensor that has one; None if there is no such tensor.

    Example:
        >>> find_batch_size({"x": torch.ones(4, 2), "y": torch.ones(4)})
        4
    """
    if type(data) is torch.Tensor and data.ndim:  # a shortcut, since most batches are a tensor or begin with a tensor
        return data.shape[0]
    if type(data) in (list, tuple, dict) and data:
        first = next(iter(data.values() if type(data) is dict else data))
        if type(first) is torch.Tensor and first.ndim:
            return first.shape[0]
    for _, leaf in iter_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
            return leaf.shape[0]
    return None


_FOR_OBJECTS = {
    "broadcast": "broadcast_object",
    "gather_for_metrics": "gather_for_metrics(objects, use_gather_object=True), with a list of an entry per sample,",
}


def tensor_leaves(data: Any, operation: str) -> list[tuple[str, torch.Tensor]]:
    """Return every tensor of nested data with its path; leaves that are None are skipped.

    Raises:
        DataError: a leaf is neither a tensor nor None.
    """
    found: list[tuple[str, torch.Tensor]] = []
    for where, leaf in iter_leaves(data):
        if isinstance(leaf, torch.Tensor):
            found.append((where, leaf))
        elif leaf is not None:
            raise NotTensorError(
                f"{operation} takes tensors, but got a {type(leaf).__name__}{' at ' + where if where else ''}. Make it "
                f"a tensor, or use {_FOR_OBJECTS.get(operation, 'gather_object')} for it."
            )
    return found


def with_tensors(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Build the structure of `data` with other tensors, which come in the order of `tensor_leaves`."""
    following = iter(tensors)
    return map_leaves(lambda leaf: next(following) if isinstance(leaf, torch.Tensor) else leaf, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested tensors, such as the batches of a loop, leaf by leaf.

    Args:
        data: sequence of nested tensors of the same structure; not changed. None stays None. A single entry without a
            tensor is returned as it is.
        dim: dimension to concatenate along; the sizes of all other dimensions must be equal. Along 0, a 0-dim tensor
            counts as one row.

    Returns:
        One structure of the same form.

    Raises:
        DataError: `data` is empty, a leaf is not a tensor, structures or shapes differ, or a tensor has no dimension
            `dim`.

    Example:
        >>> concatenate([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3])}])
        {'x': tensor([1, 2, 3])}
    """
    if not data:
        raise DataError("concatenate got an empty list: without an entry the structure is not known")
    if len(data) == 1 and not any(isinstance(leaf, torch.Tensor) for _, leaf in iter_leaves(data[0])):
        return data[0]
    entries = [tensor_leaves(entry, "concatenate") for entry in data]
    names = [[where for where, _ in entry] for entry in entries]
    for index, found in enumerate(names):
        if found != names[0]:
            raise DataError(f"concatenate: entry 0 has tensors at {names[0]}, but entry {index} at {found}")
    joined: list[torch.Tensor] = []
    for where, *column in zip(names[0], *[[tensor for _, tensor in entry] for entry in entries], strict=True):
        parts = [tensor.reshape(1) if tensor.ndim == 0 and dim == 0 else tensor for tensor in column]
        for part in parts:
            if not -part.ndim <= dim < part.ndim:
                raise DataError(
                    f"concatenate: a tensor{where and ' at ' + where} has shape {tuple(part.shape)}, and so no "
                    f"dimension {dim} to join along"
                )
        others = {tuple(n for axis, n in enumerate(part.shape) if axis != dim % part.ndim) for part in parts}
        if len(others) > 1:
            raise ShapeMismatchError(
                f"concatenate: the tensors{where and ' at ' + where} have shapes {[tuple(p.shape) for p in parts]}; "
                f"all dimensions but {dim} must agree. pad_across_processes, or padding in the loader, makes them so."
            )
        joined.append(torch.cat(parts, dim=dim))
    return with_tensors(data[0], joined)


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """Slice every tensor in dimension 0 in the same way, for instance to get one process's part of a batch.

    Args:
        data: nested data; not changed. 0-dim tensors and other objects stay as they are.
        tensor_slice: slice of the rows to take.

    Returns:
        The same structure, with views of the tensors.

    Example:
        >>> slice_tensors({"x": torch.arange(4), "name": "a"}, slice(1, 3))
        {'x': tensor([1, 2]), 'name': 'a'}
    """
    return map_leaves(
        lambda leaf: leaf[tensor_slice] if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 else leaf, data
    )
