from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.big_models import compute_module_sizes, dtype_byte_size, find_tied_parameters, retie_parameters
from instep.big_models.sizes import largest_layers, non_persistent_buffers
from instep.errors import SettingError
from instep.strategies.pipeline.split import even_cuts


class Block(nn.Module):
    """Ties, buffers of each kind, and weights beside modules: 4 + 4 * 4 * 4 + 3 * 8 + 2 * 2 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up = nn.Linear(4, 4, bias=False)
        self.down = nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2, dtype=torch.float16), persistent=False)


def test_bytes_of_an_element():
    sizes = {torch.float32: 4, "bfloat16": 2, "torch.float8_e4m3fn": 1, torch.bool: 1, "int4": 0.5, "nf4": 0.5625}
    sizes |= {"uint2": 0.25, "fp8": 1, torch.complex64: 8}
    assert {dtype: dtype_byte_size(dtype) for dtype in sizes} == sizes
    with pytest.raises(SettingError, match="float12"):
        dtype_byte_size("float12")


def test_sizes_of_modules_count_each_dtype_and_tied_weights_once():
    model = nn.Sequential(Block(), nn.ReLU())
    sizes = compute_module_sizes(model)
    assert sizes["0.up"] == sizes["0.up.weight"] == 64
    assert sizes["0.down"] == sizes["1"] == 0
    assert sizes[""] == sizes["0"] == 4 + 64 + 24 + 4
    # Integers stay; floating tensors are converted, to wider ones too.
    assert compute_module_sizes(model, "float64")[""] == 8 + 128 + 24 + 16
    assert compute_module_sizes(model, "int4")[""] == 1 + 8 + 24 + 1
    assert compute_module_sizes(model, "float16", {"0.up.weight": "float32", "0.steps": "int8"})[""] == 2 + 64 + 3 + 4
    assert compute_module_sizes(model, buffers_only=True)[""] == 28
    # What a block of modules holds itself comes to a device at a time.
    assert largest_layers(model, sizes) == {
        **dict.fromkeys(("", "0", "0.up"), 64), "0.down": 0, "1": 0, "0.scale": 4, "0.steps": 24, "0.table": 4
    }  # fmt: skip
    assert largest_layers(model, sizes, ["Block"])["0"] == 96
    assert non_persistent_buffers(model) == {"0.table"}


def test_ties_are_found_and_made_again():
    model: Any = nn.ModuleList([Block(), Block()])
    model[1].up = model[0].up
    ties = find_tied_parameters(model)
    assert ties == [["0.down.weight", "0.up.weight", "1.up.weight"]]
    for name in ties[0][1:]:
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(torch.ones(4, 4, device="meta"))
    assert find_tied_parameters(model) == [["0.up.weight", "1.up.weight"]]
    retie_parameters(model, ties)
    assert find_tied_parameters(model) == ties
    assert not model[1].up.weight.is_meta


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_no_other_cuts_have_a_smaller_largest_run(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))

    def largest(cuts: tuple[int, ...] | list[int]) -> int:
        bounds = [0, *cuts, len(sizes)]
        assert all(a < b for a, b in pairwise(bounds))
        return max(sum(sizes[a:b]) for a, b in pairwise(bounds))

    found = even_cuts(sizes, count)
    assert len(found) == count - 1
    assert largest(found) == min(largest(cuts) for cuts in combinations(range(1, len(sizes)), count - 1))
