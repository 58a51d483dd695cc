"""Data of sequences of different lengths: batches of similar lengths, and windows that hold several sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from instep.errors import SettingError
from instep.utils.checks import at_least, wrong


class LengthBucketBatchSampler(Sampler[list[int]]):
    """Batches of sequences of similar lengths, so that there is little padding.

    A random order is cut into pools of `pool` batches. Each pool is sorted by length and cut into batches, which come
    in a random order. Pass the sampler as a loader's `batch_sampler`: the Trainer and the Accelerator draw it by (seed,
    epoch), divide its batches over the ranks, and resume it within an epoch at any world size.

    With `max_tokens` the number of batches differs between epochs: `len` is the number in the last epoch that was
    drawn, and an estimate before the first epoch.

    Args:
        lengths: length of each sequence, in tokens.
        batch_size: sequences per batch; give either this or `max_tokens`.
        max_tokens: largest value of a batch's number of sequences times the length of its longest sequence.
        pool: number of batches that are sorted together. A larger pool needs less padding and is less random.
        shuffle: whether to draw a random order; False for an evaluation.
        drop_last: whether to leave out the last batch of the epoch if it has fewer sequences than `batch_size`.

    Raises:
        SettingError: neither or both of `batch_size` and `max_tokens` are given, a sequence is too long, or `drop_last`
            is given with `max_tokens`.

    Example:
        >>> batches = list(LengthBucketBatchSampler([1, 9, 2, 8, 3, 7], batch_size=2, shuffle=False))
        >>> batches
        [[0, 2], [4, 5], [3, 1]]

    Source: sorting within a pool is the usual recipe of speech recognition and translation.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        pool: int = 50,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if (batch_size is None) == (max_tokens is None):
            raise SettingError("give batch_size or max_tokens, one of them", field="batch_size", got=batch_size)
        if max_tokens is not None and drop_last:
            text = "drop_last=True leaves out a batch of fewer sequences than batch_size; leave it out with max_tokens"
            raise SettingError(text, field="drop_last", got=True)
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        if self.lengths.ndim != 1 or (self.lengths.numel() and int(self.lengths.min()) < 1):
            raise wrong("lengths", lengths, "a sequence of integers of at least 1")
        longest = int(self.lengths.max()) if self.lengths.numel() else 1
        if max_tokens is not None and longest > at_least(1)("max_tokens", max_tokens):
            raise SettingError(
                f"max_tokens={max_tokens}, but a sequence has {longest} tokens: cut it, or give more",
                field="max_tokens",
                got=max_tokens,
            )
        self.batch_size = None if batch_size is None else at_least(1)("batch_size", batch_size)
        self.max_tokens, self.shuffle, self.drop_last = max_tokens, shuffle, drop_last
        self.pool = at_least(1)("pool", pool)
        mean = max(1.0, float(self.lengths.double().mean())) if self.lengths.numel() else 1.0
        self._pooled = self.pool * (self.batch_size or max(1, int((max_tokens or 1) / mean)))
        self._drawn: int | None = None  # number of batches in the last epoch that was drawn completely

    def __iter__(self) -> Iterator[list[int]]:
        drawn = 0
        for batch in self._batches(self.shuffle):
            drawn += 1
            yield batch
        self._drawn = drawn

    def _batches(self, shuffle: bool) -> Iterator[list[int]]:
        count = self.lengths.numel()
        order = torch.randperm(count) if shuffle else torch.arange(count)
        small: list[int] = []
        for begin in range(0, count, self._pooled):
            pool = order[begin : begin + self._pooled]
            pool = pool[torch.argsort(self.lengths[pool], stable=True)].tolist()
            batches = list(self._cut(pool))
            if begin + self._pooled >= count and self.batch_size is not None and len(batches[-1]) < self.batch_size:
                small = batches.pop()
            for place in torch.randperm(len(batches)).tolist() if shuffle else range(len(batches)):
                yield batches[place]
        if small and not self.drop_last:
            yield small

    def _cut(self, indices: list[int]) -> Iterator[list[int]]:
        """Cut indices of sequences, sorted from short to long, into batches."""
        batch: list[int] = []
        for index in indices:
            full = len(batch) == self.batch_size
            if self.max_tokens is not None:
                full = (len(batch) + 1) * int(self.lengths[index]) > self.max_tokens
            if batch and full:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def __len__(self) -> int:
        if self.max_tokens is not None:
            if self._drawn is None:
                self._drawn = sum(1 for _ in self._batches(shuffle=False))
            return self._drawn
        count, size = self.lengths.numel(), self.batch_size or 1
        pools, rest = divmod(count, self._pooled)
        return pools * self.pool + (rest // size if self.drop_last else -(-rest // size))


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Data set of windows of a fixed length. Each holds whole sequences, as many as fit, and padding only at its end.

    The sequences are assigned to windows once: the longest sequence first, each into the fullest window that has room
    for it.

    Args:
        dataset: a map-style dataset of sequences: 1-d tensors or lists of token ids.
        lengths: length of each sequence, in tokens; None reads all sequences once to get their lengths.
        size: number of tokens in a window.
        padding: token that fills the window after the last sequence.

    Raises:
        SettingError: a sequence is longer than a window.

    An item is a dict of tensors, each of shape [size] and dtype int64:

    - `input_ids`: tokens.
    - `position_ids`: place of each token in its sequence.
    - `sequence_ids`: 1 for the first sequence of the window, 2 for the second ...; 0 for padding. A token may attend
      only to tokens with the same number.

    Example:
        >>> packed = PackedDataset([[5, 6, 7], [8], [9, 9]], size=4)
        >>> len(packed), packed[0]["input_ids"].tolist(), packed[0]["sequence_ids"].tolist()
        (2, [5, 6, 7, 8], [1, 1, 1, 2])

    Source: best-fit decreasing, https://en.wikipedia.org/wiki/Best-fit_bin_packing.
    """

    def __init__(self, dataset: Any, lengths: Sequence[int] | None = None, *, size: int, padding: int = 0) -> None:
        self.dataset, self.padding = dataset, padding
        self.size = at_least(1)("size", size)
        if lengths is None:
            lengths = [len(dataset[index]) for index in range(len(dataset))]
        if len(lengths) != len(dataset):
            raise SettingError(f"{len(lengths)} lengths for {len(dataset)} sequences", field="lengths")
        too_long = next((index for index, length in enumerate(lengths) if length > size), None)
        if too_long is not None:
            text = f"sequence {too_long} has {lengths[too_long]} tokens, a window {size}: cut it, or use larger windows"
            raise SettingError(text, field="size", got=size)
        self.windows = pack(lengths, size)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.full((self.size,), self.padding, dtype=torch.int64)
        positions, numbers = torch.zeros_like(ids), torch.zeros_like(ids)
        at = 0
        # A stream leaves out sequences that cannot be read, if its user chose that.
        read = getattr(self.dataset, "_instep_readable", lambda indices: [self.dataset[each] for each in indices])
        for number, tokens in enumerate(map(torch.as_tensor, read(self.windows[index])), start=1):
            end = at + len(tokens)
            ids[at:end], positions[at:end], numbers[at:end] = tokens, torch.arange(len(tokens)), number
            at = end
        return {"input_ids": ids, "position_ids": positions, "sequence_ids": numbers}


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Assign sequences to windows: the longest first, each to the fullest window that has room for it.

    Args:
        lengths: lengths of the sequences, each at most `size`.
        size: length of a window.

    Returns:
        The indices of the sequences of each window.

    Example:
        >>> pack([3, 1, 2], 4)
        [[0, 1], [2]]
    """
    windows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # number of free tokens -> indices of the windows that have this number
    rooms: list[int] = []  # keys of `by_room`, sorted
    for index in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        place = bisect_left(rooms, lengths[index])
        if place == len(rooms):
            window, room = len(windows), size
            windows.append([])
        else:
            room = rooms[place]
            window = by_room[room].pop(0)
            if not by_room[room]:
                del by_room[room], rooms[place]
        windows[window].append(index)
        left = room - lengths[index]
        if left:
            if left not in by_room:
                rooms.insert(bisect_left(rooms, left), left)
                by_room[left] = []
            by_room[left].append(window)
    return windows
