"""Splitting one input over processes: pure functions of the input, the index and the count."""

from __future__ import annotations

import sys
from typing import Any

import torch

from instep.errors import DataError


def share_of(inputs: Any, index: int, count: int, pad: bool = False) -> Any:
    """The part of `inputs` that process `index` of `count` takes.

    The first `len(inputs) % count` processes take one more than the others.

    Args:
        inputs: a list, a tuple, a tensor, a numpy array, a dataset with `select`, or a dict of these (nested too)
            whose leaves have one length. It is never changed.
        index: 0 to `count - 1`.
        count: the number of processes.
        pad: repeat the last element so that every part has the same length.

    Returns:
        A value of the same kind.

    Raises:
        TypeError: the input, or a leaf of the dict, is of another type.
        DataError: the leaves of a dict differ in length, or a tensor has no first dimension.

    Example:
        >>> [share_of([1, 2, 3, 4, 5], index, 2) for index in range(2)]
        [[1, 2, 3], [4, 5]]
    """
    lengths = _lengths(inputs, "inputs")
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{where} has {length}" for where, length in lengths.items())
        raise DataError(f"the values of a dict that is split over processes must have one length, but {text}")
    length = next(iter(lengths.values()), 0)
    share, extra = divmod(length, count)
    start = index * share + min(index, extra)
    stop = start + share + (index < extra)
    missing = 0 if not (pad and length) else share + (extra > 0) - (stop - start)
    return _take(inputs, start, stop, missing)


def _lengths(value: Any, where: str) -> dict[str, int]:
    """The length of every leaf, by its path."""
    if isinstance(value, dict):
        found: dict[str, int] = {}
        for key, item in value.items():
            found.update(_lengths(item, f"{where}[{key!r}]"))
        return found
    if type(value) in (list, tuple) or _is_dataset(value):
        return {where: len(value)}
    if isinstance(value, torch.Tensor) or _is_array(value):
        if value.ndim == 0:
            raise DataError(f"{where} is a single number of shape (): there is no first dimension to split")
        return {where: value.shape[0]}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which cannot be split over processes. Give a list, a tuple, a tensor, a "
        f"numpy array, a dataset with select(), or a dict of these."
    )


def _take(value: Any, start: int, stop: int, missing: int) -> Any:
    if isinstance(value, dict):
        return {key: _take(item, start, stop, missing) for key, item in value.items()}
    if _is_dataset(value):
        return value.select([*range(start, stop), *[len(value) - 1] * missing])
    part = value[start:stop]
    if not missing:
        return part
    last = value[-1:]
    if isinstance(value, torch.Tensor):
        return torch.cat([part, *[last] * missing])
    if _is_array(value):
        return sys.modules["numpy"].concatenate([part, *[last] * missing])
    return part + last * missing


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_dataset(value: Any) -> bool:
    return (
        callable(getattr(value, "select", None)) and hasattr(value, "__len__") and not isinstance(value, torch.Tensor)
    )
