"""A mixture of streams whose weights may change during a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch.utils.data import Dataset

from instep.errors import DataError, SettingError
from instep.streams.order import BLOCK, MOST_SOURCES, order_from
from instep.utils.checks import at_least, choice, is_int, is_number, wrong

Weights = Sequence[float] | Mapping[int, Sequence[float]]


class StreamMixture(Dataset[Any]):
    """Mixture of several data sets; in any short part of the run, each data set has its share of the samples.

    Each block of 1,024 samples has every source in its exact proportion, in a random sequence. A source makes passes of
    its own, which continue from one epoch of the mixture to the next: each of its samples comes once before any sample
    comes again. The sample at each place is a pure function of the seed and the position in the run. So the mixture is
    divided over ranks and resumed like a `StreamDataset`. Give it to a `DataLoader` with shuffle=True; with
    shuffle=False each source is read in sequence. Its indices are pairs: a source, and an index in that source. Without
    instep's loader, the indices from 0 to `len` are the places of the first epoch.

    Args:
        datasets: at most 20 sources, each a `StreamDataset`, or other map-style data, which is shuffled as a whole.
        weights: one weight for each data set, in any unit; or weights by phase, such as `{0: [7, 3], 50_000: [1, 1]}`:
            the position in the run at which a phase begins (rounded to a block), and its weights. A weight of 0 leaves
            a source out of a phase.
        size: number of samples in an epoch; None: so many that, with the first phase's weights, one source is read
            exactly once and no source is read more than once.
        measure: "samples", or "tokens": weights are then shares of the tokens, and positions of phases are counted in
            tokens, both by the mean length of each source.
        lengths: with "tokens": mean length of each source; None: taken from the index of streams with `length`.

    Raises:
        SettingError: a weight is wrong, a data set is empty, or the lengths are not known.

    Example:
        >>> mixture = StreamMixture([list("abcdefgh"), list("xyz")], weights=[3, 1], size=1024)
        >>> order = mixture._instep_order_of(True, 0, 0, 0)
        >>> sum(source == 1 for source, _ in order), mixture[order[0]] in "abcdefghxyz"
        (256, True)
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Weights,
        *,
        size: int | None = None,
        measure: str = "samples",
        lengths: Sequence[float] | None = None,
    ) -> None:
        self.datasets = list(datasets)
        if not 1 <= len(self.datasets) <= MOST_SOURCES or not all(len(each) for each in self.datasets):
            raise SettingError(
                f"datasets: expected 1 to {MOST_SOURCES} data sets with samples", field="datasets", got=datasets
            )
        choice("samples", "tokens")("measure", measure)
        phases = sorted(dict(weights if isinstance(weights, Mapping) else {0: weights}).items())
        if phases[0][0] != 0 or not all(is_int(start) and self._are_weights(each) for start, each in phases):
            raise wrong(
                "weights",
                weights,
                f"{len(self.datasets)} numbers of at least 0, or a dict of such lists by position, the first 0",
            )
        self._sources = [_spec(each) for each in self.datasets]
        means = [1.0] * len(self.datasets) if measure == "samples" else self._means(lengths)
        self._first: Sequence[Any] = ()
        self._phases = _phases(phases, means)
        shares = self._phases[0][1]
        whole = min(int(len(each) / share) for each, share in zip(self.datasets, shares, strict=True) if share)
        self.size = max(1, whole) if size is None else at_least(1)("size", size)

    def _are_weights(self, weights: Sequence[float]) -> bool:
        right = all(is_number(each) and 0 <= each < float("inf") for each in weights)
        return right and len(weights) == len(self.datasets) and sum(weights) > 0

    def _means(self, lengths: Sequence[float] | None) -> list[float]:
        if lengths is None:
            if not all(getattr(each, "length", None) for each in self.datasets):
                text = "measure='tokens' needs lengths=, or streams that were made with length="
                raise SettingError(text, field="lengths", got=lengths)
            return [float(each.lengths.mean()) for each in self.datasets]
        if len(lengths) != len(self.datasets) or not all(is_number(each) and each > 0 for each in lengths):
            raise wrong("lengths", lengths, f"{len(self.datasets)} numbers above 0")
        return [float(each) for each in lengths]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        source, own = self._pair(index)
        return self.datasets[source][own]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples of a batch; they are read source by source."""
        pairs = [self._pair(index) for index in indices]
        order = sorted(range(len(pairs)), key=lambda place: pairs[place][0])
        found: list[tuple[int, Any]] = []
        for source, group in groupby(order, key=lambda place: pairs[place][0]):
            mine = list(group)
            dataset, own = self.datasets[source], [pairs[place][1] for place in mine]
            many = getattr(dataset, "_instep_readable", getattr(dataset, "__getitems__", None))
            samples = [dataset[index] for index in own] if many is None else many(own)
            # A source that leaves out bad samples returns fewer samples than indices. Its later samples then move up to
            # the places of earlier ones, which changes only their order in the batch.
            found += zip(mine, samples, strict=False)
        if pairs and not found:
            self.datasets[pairs[0][0]].__getitems__([pairs[0][1]])  # raises: no sample of the batch can be read
        return [sample for _, sample in sorted(found, key=lambda each: each[0])]

    def _pair(self, index: Any) -> tuple[int, int]:
        """Return a sample's source and its index there; a plain number is a place in the first epoch under seed 0."""
        if isinstance(index, tuple):
            return index
        if not self._first:
            self._first = self._instep_order_of(True, 0, 0, 0)
        return self._first[index]

    def describe_sample(self, index: Any) -> str:
        """Return the place of a sample, for a message."""
        source, own = self._pair(index)
        described = getattr(self.datasets[source], "describe_sample", None)
        return f"sample {own} of data set {source}" if described is None else described(own)

    # ---- methods that instep's loader calls on a data set with its own order

    def _instep_order_of(self, shuffle: bool, seed: int, epoch: int, cycle: int) -> Sequence[int]:
        """Return the order of an epoch."""
        return order_from(self._instep_order_spec(epoch), shuffle, seed, epoch, cycle)

    def _instep_order_spec(self, epoch: int) -> dict[str, Any]:
        """Describe the order of an epoch, for the command `instep runs samples`."""
        return {"sources": self._sources, "phases": self._phases, "size": self.size}

    def _instep_order_mark(self, epoch: int) -> dict[str, Any]:
        """Return the facts, besides the seed, that determine the order; a checkpoint stores them."""
        spec = self._instep_order_spec(epoch)
        before = [phase for phase in self._phases if phase[0] < (epoch + 1) * self.size]
        text = json.dumps([spec["sources"], before, self.size])
        return {"digest": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def _instep_go_on(self, mark: Any, epoch: int) -> None:
        """Continue an interrupted epoch, after checking that its order is the same.

        Raises:
            DataError: the sources, the size, or weights of phases that have begun by the epoch's end have changed.
        """
        if mark != self._instep_order_mark(epoch):
            raise DataError(
                "the mixture's data sets, its size, or the weights up to the end of this epoch are not those that the "
                "epoch was begun with. Give the same ones (weights of later phases may change), or resume from the end "
                "of an epoch"
            )


def _spec(dataset: Any) -> dict[str, Any]:
    if hasattr(dataset, "_instep_order_spec"):
        spec = dataset._instep_order_spec(-1)
        if "sources" in spec or "bucket" in spec:
            raise SettingError("a source of a mixture can be no mixture, and have no buckets", field="datasets")
        return spec
    return {"files": [(type(dataset).__name__, len(dataset))], "window": len(dataset)}


def _phases(phases: Sequence[tuple[int, Sequence[float]]], means: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Return the positions in the run, in samples, at which the shares change, each with the new shares."""
    found: list[tuple[int, list[float]]] = []
    position = 0.0
    for number, (start, weights) in enumerate(phases):
        parts = [weight / mean for weight, mean in zip(weights, means, strict=True)]
        found.append((round(position / BLOCK) * BLOCK, [part / sum(parts) for part in parts]))
        if number + 1 < len(phases):
            # The last factor converts tokens to samples: the inverse of the mean number of tokens in a sample.
            position += (phases[number + 1][0] - start) * sum(parts) / sum(weights)
    return found
