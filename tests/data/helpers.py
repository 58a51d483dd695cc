"""Data for the tests of this folder, and the lengths and batch sizes at which a pass can end differently."""

from __future__ import annotations

import os

from torch.utils.data import Dataset

from instep.state import PartialState

LENGTHS, SIZES = range(41), range(1, 9)
EVERY = os.environ.get("INSTEP_LENGTHS_EVERY") == "1"


def endings(world: int) -> list[tuple[int, int]]:
    """Lengths and batch sizes that end a pass of several ranks in every way; all of them with INSTEP_LENGTHS_EVERY=1.

    The last batch is whole, has one sample, or lacks one; it goes to any rank, in the first round of all ranks or in
    the second, after which the end repeats from round to round. Sizes are less and more than the ranks, and as many,
    which matters where a batch is split among them.
    """
    if EVERY:
        return [(length, size) for length in LENGTHS for size in SIZES]
    return [
        (length, size)
        for size in sorted({1, 2, 3, world, world + 1, SIZES[-1]})
        for length in LENGTHS
        if length % size in (0, 1, size - 1)
        and (length <= size * world + size + 1 or abs(length - 2 * size * world) <= 1)
    ]


def rank() -> int:
    """This process's rank, on a CPU."""
    return PartialState(cpu=True).process_index


class Numbers(Dataset[int]):
    """The numbers from 0; it counts how often it was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index
