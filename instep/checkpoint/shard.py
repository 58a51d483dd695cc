"""Parts of tensors: what one rank holds of a tensor that several ranks make up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, or a run of its elements, to be written by the rank that holds it.

    A state may hold one where it would hold a tensor: the writer stores the part, and a reader of the whole checkpoint
    finds the tensor again, whatever ranks wrote it.

    Args:
        local: the part: a plain tensor, on any device.
        shape: of the whole tensor.
        offsets: where the box begins, one number per dimension of `shape`. With `flat`, one number: the element at
            which a 1-dim part of the flattened tensor begins.
        flat: whether `local` is such a run of elements.

    Example:
        >>> Shard(torch.ones(2, 3), shape=(4, 3), offsets=(2, 0)).offsets
        (2, 0)
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    flat: bool = False

    def __post_init__(self) -> None:
        here, begin = tuple(self.local.shape), self.offsets
        total = (math.prod(self.shape),) if self.flat else tuple(self.shape)
        if not len(here) == len(begin) == len(total) or any(
            at < 0 or at + size > end for at, size, end in zip(begin, here, total, strict=True)
        ):
            raise ValueError(f"a part of shape {here} at {begin} does not lie within a tensor of shape {self.shape}")

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Which part of what it is."""
        return tuple(self.shape), tuple(self.offsets), self.flat


class StoredTensor(Protocol):
    """A tensor of a checkpoint that is read when asked for; it may lie in many files."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        ...

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor, or a box of it, on the CPU, in memory of its own; only what the box needs is read.

        Args:
            box: a slice with start and stop per dimension; None for all of it.
        """
        ...
