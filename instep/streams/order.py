"""Shuffled orders that are never stored: any part of an order is computed when it is needed."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from instep.utils.seed import derive_seed

BLOCK = 1024  # number of samples in a block of a mixture; in each block, every source has its exact proportion
MOST_SOURCES = 20  # maximum number of sources, since in a block one source makes up for the rounding of all others
_WINDOWS = 4  # number of windows that are kept, for several ranks in one process and for a batch across two windows


class LazyOrder(Sequence[Any]):
    """Order whose slices are computed on demand: `order[start:stop]` is a list.

    Subclasses have `__len__` and `_part(start, stop)`, with 0 <= start < stop <= len.
    """

    @abstractmethod
    def _part(self, start: int, stop: int) -> list[Any]: ...

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

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 1024):
            yield from self[start : start + 1024]


class WindowOrder(LazyOrder):
    """Order of shards in a random sequence, with their samples shuffled within windows.

    The shards are put into a random sequence. Then each `window` consecutive samples are permuted among themselves.
    Every part is a pure function of the arguments. The object holds the counts and a few windows.

    Args:
        counts: number of samples in each shard; sample i of shard s has the index `sum(counts[:s]) + i`.
        window: number of samples that are permuted together.
        *parts: numbers and texts from which the draw is derived, such as seed and epoch.
        lengths: length of each sample; the samples of a window are sorted by length before they are cut into buckets.
        bucket: number of samples in a bucket; the buckets of a window come in a random sequence. 0: no buckets.

    Example:
        >>> order = WindowOrder([3, 2], 2, 0)
        >>> sorted(order), order[1:3] == list(order)[1:3]
        ([0, 1, 2, 3, 4], True)
    """

    def __init__(
        self, counts: Sequence[int], window: int, *parts: int | str, lengths: Any = None, bucket: int = 0
    ) -> None:
        self._window, self._parts, self._lengths, self._bucket = window, parts, lengths, bucket
        sizes = np.asarray(counts, dtype=np.int64)
        sequence = torch.randperm(len(sizes), generator=self._dice("shards")).numpy()
        firsts = np.cumsum(sizes) - sizes
        self._ends = np.cumsum(sizes[sequence])
        # For each shard: the index of a sample, minus the sample's position in the random sequence of shards.
        self._moved = firsts[sequence] - (self._ends - sizes[sequence])
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
        if number not in self._kept:
            first = number * self._window
            size = min(self._window, len(self) - first)
            places = first + torch.randperm(size, generator=self._dice("window", number)).numpy()
            indices = places + self._moved[np.searchsorted(self._ends, places, side="right")]
            _keep(self._kept, number, self._bucketed(indices, number) if self._bucket else indices)
        return self._kept[number]

    def _bucketed(self, indices: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
        """Put samples of similar length together; samples that fill no bucket come last."""
        by_length = indices[np.argsort(self._lengths[indices], kind="stable")]
        whole = len(indices) // self._bucket
        buckets = by_length[: whole * self._bucket].reshape(whole, self._bucket)
        drawn = torch.randperm(whole, generator=self._dice("buckets", number)).numpy()
        return np.concatenate([buckets[drawn].reshape(-1), by_length[whole * self._bucket :]])

    def _dice(self, *what: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(*self._parts, *what))


class MixtureOrder(LazyOrder):
    """Order of an epoch over several sources; each source has its share of every block of 1,024 samples.

    An index is a pair: the index of the source, and the index in the source.

    Positions, and the passes of each source, are counted over all epochs. Each pass has a new order.

    Args:
        spec: description of the mixture: `sources`, the specs of the sources' orders; `phases`, pairs of a position and
            the shares from that position on; `size`, the number of samples in an epoch.
        shuffle: whether the samples of the sources are shuffled; the sequence of the sources is drawn in any case.
        seed: seed of all random draws.
        epoch: number of the epoch.
    """

    def __init__(self, spec: dict[str, Any], shuffle: bool, seed: int, epoch: int) -> None:
        self._spec, self._shuffle, self._seed, self._begin = spec, shuffle, seed, epoch * spec["size"]
        self._lengths = [sum(count for _, count in source["files"]) for source in spec["sources"]]
        self._kept: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        self._orders: OrderedDict[tuple[int, int], Sequence[int]] = OrderedDict()

    def __len__(self) -> int:
        return self._spec["size"]

    def _part(self, start: int, stop: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        start, stop = start + self._begin, stop + self._begin
        while start < stop:
            number, at = divmod(start, BLOCK)
            some = self._block(number)[at : at + stop - start]
            found += some
            start += len(some)
        return found

    def _block(self, number: int) -> list[tuple[int, int]]:
        if number not in self._kept:
            before, after = self.used(number * BLOCK), self.used((number + 1) * BLOCK)
            counts = [end - start for start, end in zip(before, after, strict=True)]
            dice = torch.Generator().manual_seed(derive_seed(self._seed, "block", number))
            sources = np.repeat(np.arange(len(counts)), counts)[torch.randperm(BLOCK, generator=dice).numpy()]
            samples = [iter(self._samples(source, before[source], count)) for source, count in enumerate(counts)]
            _keep(self._kept, number, [(source, next(samples[source])) for source in sources.tolist()])
        return self._kept[number]

    def used(self, position: int) -> list[int]:
        """Return how many samples of each source come before a position of the run."""
        phases, found = self._spec["phases"], [0] * len(self._lengths)
        ends = [start for start, _ in phases[1:]] + [position]
        for (start, shares), end in zip(phases, ends, strict=True):
            here = min(end, position) - start
            if here <= 0:
                continue
            parts = [int(share * here) for share in shares]
            # Samples that are left over by rounding go to the source with the largest share.
            parts[shares.index(max(shares))] += here - sum(parts)
            found = [one + part for one, part in zip(found, parts, strict=True)]
        return found

    def _samples(self, source: int, used: int, count: int) -> list[int]:
        """Return the next `count` indices of a source after its first `used` samples, counted over all its passes."""
        found: list[int] = []
        while count:
            number, at = divmod(used, self._lengths[source])
            if (source, number) not in self._orders:
                seed = derive_seed(self._seed, "source", source)
                order = order_from(self._spec["sources"][source], self._shuffle, seed, number, 0)
                _keep(self._orders, (source, number), order, 2 * len(self._lengths))
            some = self._orders[source, number][at : at + count]
            found += some
            used, count = used + len(some), count - len(some)
        return found


def order_from(
    spec: dict[str, Any], shuffle: bool, seed: int, epoch: int, cycle: int, lengths: Any = None
) -> Sequence[int]:
    """Make the order that a spec of JSON values describes.

    Args:
        spec: `files`, pairs of a name and a count, and `window`; with buckets also `bucket`. Or the spec of a
            `MixtureOrder`.
        shuffle: whether samples are shuffled; False keeps their sequence.
        seed: seed of the draw, together with the epoch and the cycle.
        epoch: the epoch.
        cycle: how often the data has been started again within the epoch.
        lengths: with buckets: the length of each sample.
    """
    if "sources" in spec:
        return MixtureOrder(spec, shuffle, seed if not cycle else derive_seed(seed, "cycle", cycle), epoch)
    counts = [count for _, count in spec["files"]]
    if not shuffle:
        return range(sum(counts))
    bucket = spec.get("bucket", 0)
    return WindowOrder(counts, spec["window"], seed, "order", epoch, cycle, lengths=lengths, bucket=bucket)


def place_of(spec: dict[str, Any], sample: Any) -> str:
    """Return, as text, the file of a sample and the index of its record in the file, for the order of a spec."""
    if "sources" in spec:
        source, sample = sample
        return place_of(spec["sources"][source], sample)
    ends = np.cumsum([count for _, count in spec["files"]], dtype=np.int64)
    file = int(np.searchsorted(ends, sample, side="right"))
    name, count = spec["files"][file]
    return f"{name}, record {sample - int(ends[file]) + count}"


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int = _WINDOWS) -> None:
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)
