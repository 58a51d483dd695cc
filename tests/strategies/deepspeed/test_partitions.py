"""Runs of elements out of whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from instep.strategies.deepspeed.partitions import take_run


class Stored:
    """A stored tensor that notes what is read of it."""

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self.read_elements = 0

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        part = self.whole if box is None else self.whole[box]
        self.read_elements += part.numel()
        return part.clone()


@pytest.mark.parametrize("shape", [(12,), (4, 3), (2, 3, 2), (1, 12)])
@pytest.mark.parametrize(("begin", "count"), [(0, 12), (0, 1), (5, 4), (11, 1), (3, 0)])
def test_a_run_is_read_of_the_rows_it_is_in(shape: tuple[int, ...], begin: int, count: int) -> None:
    whole: Any = torch.arange(12.0).view(shape)
    stored: Any = Stored(whole)
    expected = torch.arange(begin, begin + count, dtype=torch.float32)
    assert torch.equal(take_run(whole, begin, count), expected)
    assert torch.equal(take_run(stored, begin, count), expected)
    assert count == 0 or stored.read_elements <= count + 2 * (12 // shape[0]) - 2
