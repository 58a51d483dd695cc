"""Shuffled orders that are never written down: any part of them is computed when it is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from instep.utils.seed import derive_seed

_WINDOWS = 4  # that are kept: ranks that are simulated in one process, and a batch over an edge


class LazyOrder(Sequence[int]):
    """Order of which slices are computed on demand: `order[start:stop]` is a list.

    Subclasses have `__len__` and `_part(start, stop)`, with 0 <= start < stop <= len.
    """

    def _part(self, start: int, stop: int) -> list[int]:
        raise NotImplementedError

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                return [self[place] for place in range(start, stop, step)]
            return self._part(start, stop) if start < stop else []
        place = key + len(self) if key < 0 else key
        if not 0 <= place < len(self):
            raise IndexError(f"place {key} of an order of {len(self)}")
        return self._part(place, place + 1)[0]

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), 1024):
            yield from self[start : start + 1024]


class WindowOrder(LazyOrder):
    """Order of shards in a drawn sequence, with their samples shuffled within windows.

    The shards are put into a drawn sequence. The samples that follow each other then, `window` at a time, are
    permuted among themselves. Every part is a pure function of the arguments. It holds the counts and a few windows.

    Args:
        counts: samples of each shard; sample i of shard s has the index `sum(counts[:s]) + i`.
        window: samples that are permuted together.
        *parts: what the draw is derived from, such as seed and epoch.

    Example:
        >>> order = WindowOrder([3, 2], 2, 0)
        >>> sorted(order), order[1:3] == list(order)[1:3]
        ([0, 1, 2, 3, 4], True)
    """

    def __init__(self, counts: Sequence[int] | np.ndarray[Any, Any], window: int, *parts: int | str) -> None:
        self._window, self._parts = window, parts
        counts = np.asarray(counts, dtype=np.int64)
        sequence = torch.randperm(len(counts), generator=self._dice("shards")).numpy()
        firsts = np.cumsum(counts) - counts
        self._ends = np.cumsum(counts[sequence])
        self._moved = firsts[sequence] - (self._ends - counts[sequence])  # an index minus its place before the windows
        self._kept: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _part(self, start: int, stop: int) -> list[int]:
        found: list[int] = []
        while start < stop:
            number, at = divmod(start, self._window)
            some = self._indices(number)[at : at + stop - start].tolist()
            found += some
            start += len(some)
        return found

    def _indices(self, number: int) -> np.ndarray[Any, Any]:
        if number in self._kept:
            return self._kept[number]
        first = number * self._window
        size = min(self._window, len(self) - first)
        places = first + torch.randperm(size, generator=self._dice("window", number)).numpy()
        indices = places + self._moved[np.searchsorted(self._ends, places, side="right")]
        self._kept[number] = indices
        if len(self._kept) > _WINDOWS:
            self._kept.popitem(last=False)
        return indices

    def _dice(self, *what: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(*self._parts, *what))
