"""`MixtureSampler`: a weighted mixture of data sets, each of which is read completely before a sample is used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import ConcatDataset, Sampler

from instep.errors import SettingError
from instep.utils.checks import at_least, is_number, wrong
from instep.utils.seed import derive_seed


class MixtureSampler(Sampler[int]):
    """Sampler of a `ConcatDataset` that draws from each of its data sets in proportion to a weight.

    Pass it as a loader's `sampler`, with a `torch.utils.data.ConcatDataset` of the same data sets. Each data set is
    read in a random order that continues over the epochs: each of its samples is used once before any is used again.
    The samples of an epoch depend only on `seed` and the epoch. So the Trainer and the Accelerator can divide them over
    the ranks, and resume within an epoch at any world size.

    Args:
        datasets: the data sets, or their lengths.
        weights: one weight for each data set, in any unit; the samples are drawn in proportion to the weights.
        size: samples in an epoch, at least the square of the number of data sets. None: as many samples as it takes
            until one of the data sets has been read once.
        seed: seed of all orders.

    Raises:
        SettingError: a weight is not above 0, or a data set is empty.

    Example:
        >>> sampler = MixtureSampler([100, 10], weights=[3, 1], size=8)
        >>> sum(index >= 100 for index in sampler)
        2
    """

    def __init__(
        self,
        datasets: ConcatDataset[object] | Sequence[object],
        weights: Sequence[float],
        size: int | None = None,
        seed: int = 0,
    ) -> None:
        parts = datasets.datasets if isinstance(datasets, ConcatDataset) else datasets
        self.lengths = [part if isinstance(part, int) else len(part) for part in parts]  # type: ignore[arg-type]
        if len(weights) != len(self.lengths) or not all(is_number(each) and each > 0 for each in weights):
            raise wrong("weights", weights, f"{len(self.lengths)} numbers above 0, one for each data set")
        if not self.lengths or min(self.lengths) < 1:
            raise SettingError("a data set of the mixture is empty", field="datasets", got=self.lengths)
        self.shares = [float(each) / sum(map(float, weights)) for each in weights]
        whole = int(min(length / share for length, share in zip(self.lengths, self.shares, strict=True)))
        least = len(self.lengths) ** 2
        self.size = max(least, whole) if size is None else at_least(least)("size", size)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The Trainer and the Accelerator call this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        begin = self.epoch * self.size
        drawn = self._sources(begin)
        order = torch.empty_like(drawn)
        first = 0
        for source, length in enumerate(self.lengths):
            mine = (drawn == source).nonzero().squeeze(1)
            used = self._used(source, begin)
            order[mine] = first + self._samples(source, used, mine.numel())
            first += length
        yield from order.tolist()

    def _used(self, source: int, position: int) -> int:
        """Return how many samples of a data set come before a position in the mixture, counted over all epochs."""
        parts = [int(share * position) for share in self.shares]
        # samples that are left over by rounding go to the data set with the largest weight
        rest = self.shares.index(max(self.shares))
        return position - sum(parts) + parts[rest] if source == rest else parts[source]

    def _sources(self, begin: int) -> torch.Tensor:
        """Draw the data set of each sample of the epoch.

        The number of samples of each data set is exact; their order is random.
        """
        end = begin + self.size
        counts = [self._used(source, end) - self._used(source, begin) for source in range(len(self.lengths))]
        every = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return every[torch.randperm(self.size, generator=self._dice("sources", self.epoch))]

    def _samples(self, source: int, used: int, count: int) -> torch.Tensor:
        """Return the next `count` samples of a data set after `used` samples, over as many passes as necessary."""
        length, found = self.lengths[source], []
        while count:
            number, at = divmod(used, length)
            some = torch.randperm(length, generator=self._dice(f"pass of {source}", number))[at : at + count]
            found.append(some)
            used, count = used + some.numel(), count - some.numel()
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def _dice(self, what: str, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, what, number))
