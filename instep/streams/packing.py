"""Pack the sequences of a stream into windows of a fixed number of tokens, block by block."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from instep.data.lengths import PackedDataset, pack
from instep.errors import DataError, SettingError
from instep.streams.order import order_from
from instep.utils.checks import at_least

_KEPT = 4  # number of blocks whose windows are kept in memory


class PackedStream(PackedDataset):
    """`PackedDataset` of a stream: neighboring sequences are packed block by block.

    The windows of a block are built when they are read, and only those of the last few blocks stay in memory. At the
    start, all windows are counted, which takes about two seconds for a million sequences. With shuffle=True the blocks
    come in a random sequence, and the windows of about one block are shuffled among themselves, so files are read
    nearly in their own order. The data set is divided over ranks and resumed like the stream.

    Args:
        dataset: a `StreamDataset` whose samples are sequences of token ids.
        lengths: length of each sequence, in tokens; None: the `lengths` of the data set.
        size: number of tokens in a window.
        padding: token that fills a window after its last sequence.
        block: number of sequences that are packed together.

    Raises:
        SettingError: a sequence is longer than a window, or the lengths are not known.

    Example:
        >>> packed = PackedStream([[5, 6, 7], [8], [9, 9]], [3, 1, 2], size=4, block=2)
        >>> len(packed), packed[0]["input_ids"].tolist(), packed[1]["sequence_ids"].tolist()
        (2, [5, 6, 7, 8], [1, 1, 0, 0])
    """

    def __init__(
        self, dataset: Any, lengths: Sequence[int] | None = None, *, size: int, padding: int = 0, block: int = 10_000
    ) -> None:
        self.dataset, self.padding, self.size = dataset, padding, at_least(1)("size", size)
        found = np.asarray(dataset.lengths if lengths is None else lengths)
        if len(found) != len(dataset):
            raise SettingError(f"{len(found)} lengths for {len(dataset)} sequences", field="lengths")
        if len(found) and found.max() > size:
            worst = int(found.argmax())
            text = f"sequence {worst} has {found[worst]} tokens, a window {size}: cut it, or use larger windows"
            raise SettingError(text, field="size", got=size)
        self.windows: Any = _Windows(found, self.size, at_least(1)("block", block))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the windows of a batch, except those of which no sequence can be read: their loss would be nan."""
        found = [window for window in map(self.__getitem__, indices) if window["sequence_ids"].any()]
        if len(indices) and not found:
            raise DataError(f"no sequence of a batch of windows can be read, as {self.describe_sample(indices[0])}")
        return found

    def describe_sample(self, index: int) -> str:
        """Describe in a text where the sequences of a window come from, for messages."""
        described = getattr(self.dataset, "describe_sample", lambda sequence: f"sequence {sequence}")
        return "; ".join(described(sequence) for sequence in self.windows[index])

    def _instep_order_of(self, shuffle: bool, seed: int, epoch: int, cycle: int) -> Sequence[int]:
        return order_from(self._instep_order_spec(epoch), shuffle, seed, epoch, cycle)

    def _instep_order_spec(self, epoch: int) -> dict[str, Any]:
        counts = self.windows.counts.tolist()
        return {"files": [(f"block {number}", count) for number, count in enumerate(counts)], "window": max(counts)}

    def _instep_order_mark(self, epoch: int) -> dict[str, Any]:
        text = json.dumps([self._instep_order_spec(epoch), self.size])
        return {"digest": hashlib.sha256(text.encode()).hexdigest()[:16]}

    def _instep_go_on(self, mark: Any, epoch: int) -> None:
        if mark != self._instep_order_mark(epoch):
            raise DataError(
                "the packed sequences are not those that the epoch was begun with: their lengths, size or block "
                "differ. Give the same ones, or resume from the end of an epoch"
            )


class _Windows:
    """The windows of all blocks, each a list of its sequences, computed when a window is read."""

    def __init__(self, lengths: np.ndarray[Any, Any], size: int, block: int) -> None:
        self._lengths, self._size, self._block = lengths, size, block
        self._kept: OrderedDict[int, list[list[int]]] = OrderedDict()
        blocks = range(-(-len(lengths) // block))
        self.counts = np.array([len(self._packed(number)) for number in blocks], np.int64)
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        if number not in self._kept:
            self._kept[number] = self._packed(number)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        first = number * self._block
        window = self._kept[number][int(index - self._ends[number] + self.counts[number])]
        return [first + sequence for sequence in window]

    def _packed(self, number: int) -> list[list[int]]:
        return pack(self._lengths[number * self._block : (number + 1) * self._block].tolist(), self._size)
