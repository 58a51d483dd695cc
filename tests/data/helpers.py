"""Data for the tests of this folder."""

from __future__ import annotations

from torch.utils.data import Dataset

from instep.state import PartialState


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
