"""`Splitter`: cuts slices out of batches with any nested structure, and counts their samples.

A list of tensors may hold columns (each as long as the batch) or samples, and the list itself does not show which. A
wrong guess would silently train on wrong data. So a list is split only if its meaning is certain from the known batch
size, the types of the items, or an earlier batch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from instep.distributed import find_batch_size
from instep.errors import DataError

_ADVICE = (
    "Give batches whose tensors and lists all begin with the sample, or let every rank read (dispatch=False; in a "
)
_ADVICE += "DataLoaderConfiguration: dispatch_batches=False)"


class Splitter:
    """Splitter of batches, which also counts their samples.

    Tensors are split in dimension 0. A list or tuple of samples is split by its items, if it has one item per
    sample. In mappings, dataclasses, named tuples, and lists or tuples of columns, each value is split. Other objects
    are not split.

    Args:
        columns: how to treat an ambiguous list, which could hold columns or samples. True: as columns, which is right
            for batches of torch's default collation, since it makes no lists of samples. False: the types of the items
            or an earlier batch must decide, or else an error is raised.

    Example:
        >>> splitter = Splitter()
        >>> splitter.part({"x": torch.arange(3), "name": ["a", "b", "c"]}, 3, 1, 3)
        {'x': tensor([1, 2]), 'name': ['b', 'c']}
    """

    def __init__(self, columns: bool = False) -> None:
        self._columns = columns
        # path of a list in the batch -> what its items are: True for columns, False for samples, None for neither
        self._known: dict[tuple[Any, ...], bool | None] = {}

    def count(self, batch: Any, size: int | None = None, exact: bool = False) -> int | None:
        """Count the samples in a batch; None if the batch has neither a tensor nor a list.

        Args:
            batch: any structure.
            size: number of samples that the batch should have; None if unknown.
            exact: whether the batch must have exactly `size` samples; else at most `size`.

        Raises:
            DataError: `size` and `exact` do not allow the batch's number of samples, or that number is ambiguous.
        """
        if size is None:
            return self._guess(batch, None)
        options, _ = _lengths(batch)
        if not options:
            # None if the batch has no tensor; if its tensors have different lengths, `part` raises an error later
            return find_batch_size(batch)
        found = size if exact and size in options else None if exact else self._guess(batch, size)
        if found is None or found > size:
            least = find_batch_size(batch)
            raise DataError(
                f"rank 0 splits its batches over the ranks, but a batch that should have {'' if exact else 'at most '}"
                f"{size} samples has {min(options, default=0) if least is None else least} by its first "
                f"{'list' if least is None else 'tensor'}, in a {type(batch).__name__}. {_ADVICE}"
            )
        return found

    def _guess(self, batch: Any, size: int | None) -> int | None:
        """Return the number of samples of a batch, found from its structure; raise DataError if it is ambiguous."""
        options, tensors = _lengths(batch)
        if options is None:
            return None
        if _is_list(batch):
            own, (columns, tensors) = len(batch), _common(batch)
            known = self._known.get((), True if self._columns else None)
            if columns and size is not None:
                columns = {length for length in columns if length <= size}
                known = True if own > size else known
            if not columns or known is False:
                return own
            if known is None and not tensors and columns != {own}:
                raise _ambiguous(batch)
            options = columns
        if size is not None and len(options) > 1:
            options = {option for option in options if option <= size}
            if size in options:
                return size
        if len(options) > 1:
            raise _ambiguous(batch)
        return next(iter(options), find_batch_size(batch))

    def part(self, data: Any, rows: int | None, begin: int, end: int, *, place: tuple[Any, ...] = ()) -> Any:
        """Return the samples from `begin` to `end` of a batch, or of a value inside a batch.

        Args:
            data: the batch, or the value.
            rows: number of samples in the batch; None, if they could not be counted, is an error.
            begin: index of the first sample to return.
            end: index after the last sample to return.
            place: path of keys and indices from the batch to `data`; empty if `data` is the batch.

        Raises:
            DataError: `rows` is None, a tensor does not have `rows` rows, or a list could be split in two ways.
        """
        if rows is None:
            raise DataError(
                f"rank 0 reads for all ranks, but its batch, a {type(data).__name__}, has no tensor and no list to "
                f"split. {_ADVICE}"
            )
        if _is_list(data):
            by_columns = self._by_columns(data, rows, place)
            if not by_columns:
                return data if by_columns is None else data[begin:end]
        if isinstance(data, (list, tuple)):
            values = [self.part(value, rows, begin, end, place=(*place, i)) for i, value in enumerate(data)]
            return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
        if isinstance(data, Mapping):
            mapping: Any = copy.copy(data)
            for key, value in data.items():
                mapping[key] = self.part(value, rows, begin, end, place=(*place, key))
            return mapping
        if dataclasses.is_dataclass(data) and not isinstance(data, type):
            instance = copy.copy(data)
            for field in dataclasses.fields(data):
                value = self.part(getattr(data, field.name), rows, begin, end, place=(*place, field.name))
                # use the `__setattr__` of `object`, since the dataclass may be frozen
                object.__setattr__(instance, field.name, value)
            return instance
        leaf: Any = data
        shape = getattr(leaf, "shape", ())
        if len(shape) == 0:
            return data
        if shape[0] != rows:
            raise DataError(
                f"rank 0 splits its batches over the ranks, but a batch of {rows} samples has a {type(leaf).__name__} "
                f"of shape {tuple(shape)}: its dimension 0 is not the sample. {_ADVICE}"
            )
        return leaf[begin:end]

    def _by_columns(self, data: Any, rows: int, place: tuple[Any, ...]) -> bool | None:
        """Return True if a list's items are columns, False if they are samples, None if they are neither."""
        common, tensors = _common(data)
        columns, samples = common is not None and rows in common, len(data) == rows
        if not tensors and self._known.get(place, False) is None:
            return None  # in an earlier batch they were neither; now they may be as many as the samples by chance
        if not columns and not samples:
            if not tensors and self._known.setdefault(place) is not None:
                raise DataError(
                    f"rank 0 splits its batches over the ranks, but a {type(data).__name__} had an item for each "
                    f"sample before, and has {len(data)} items in a batch of {rows} samples. {_ADVICE}"
                )
            return True if tensors else None
        if columns != samples:
            self._known[place] = columns
            return columns
        kinds = [_kind(item) for item in data]
        same, plain = len(set(kinds)) == 1, all(_is_plain(kind) for kind in kinds)
        if self._columns or rows == 0 or (plain and not same):
            return True
        if same and not plain:
            return False
        if place not in self._known:
            raise _ambiguous(data)
        return self._known[place]


def _ambiguous(data: Any) -> DataError:
    return DataError(
        f"rank 0 splits its batches over the ranks, but a {type(data).__name__} of {len(data)} items may hold "
        f"{len(data)} samples, or columns with a value for each. {_ADVICE}"
    )


def _is_list(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and not hasattr(data, "_fields")


def _lengths(data: Any) -> tuple[set[int] | None, bool]:
    """Return the possible numbers of samples in a structure (None: any number), and whether tensors determine them."""
    if _is_list(data):
        common, tensors = _common(data)
        return {len(data)} | (common or set()), tensors
    if isinstance(data, (list, tuple)):
        return _common(data)
    if isinstance(data, Mapping):
        return _common(data.values())
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return _common(getattr(data, field.name) for field in dataclasses.fields(data))
    shape: Any = getattr(data, "shape", ())
    return ({int(shape[0])}, True) if len(shape) else (None, False)


def _common(values: Iterable[Any]) -> tuple[set[int] | None, bool]:
    """Return the same as `_lengths`, for values that are columns of one batch.

    Lengths of tensors take precedence over lengths of lists.
    """
    firm: set[int] | None = None
    soft: set[int] | None = None
    for value in values:
        lengths, tensors = _lengths(value)
        if lengths is None:
            continue
        if tensors:
            firm = lengths if firm is None else firm & lengths
        else:
            soft = lengths if soft is None else soft & lengths
    if firm is None:
        return soft, False
    return (firm & soft if soft and firm & soft else firm), True


def _kind(data: Any) -> Any:
    """Describe the type of a value, so that all values of one column have the same description."""
    if isinstance(data, torch.Tensor):
        return data.dtype, data.ndim
    if isinstance(data, (list, tuple)):
        return type(data), frozenset(_kind(item) for item in data)
    return type(data)


def _is_plain(kind: Any) -> bool:
    """Return True if a value of this kind can be a column: it is no list or tuple with items of different kinds."""
    return not (isinstance(kind, tuple) and isinstance(kind[1], frozenset) and len(kind[1]) > 1)
