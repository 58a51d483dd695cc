from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, namedtuple
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import DataError
from instep.state import PartialState
from instep.state.partial import share_of


def shares(inputs: Any, count: int, pad: bool = False) -> list[Any]:
    return [share_of(inputs, index, count, pad) for index in range(count)]


def as_lists(parts: list[Any]) -> list[list[Any]]:
    return [part.tolist() if hasattr(part, "tolist") else list(part) for part in parts]


class Dataset:
    """As datasets libraries have them: a length and a selection by index."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Any:
        return iter(self.items)

    def select(self, indices: list[int]) -> Dataset:
        return Dataset([self.items[index] for index in indices])


KINDS = [list, tuple, torch.tensor, np.array, Dataset]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_processes_take_one_more(kind: Any) -> None:
    parts = shares(kind([1, 2, 3, 4, 5]), 3)
    assert as_lists(parts) == [[1, 2], [3, 4], [5]]
    assert {type(part) for part in parts} == {type(kind([1]))}


@pytest.mark.parametrize("kind", KINDS)
def test_padding_repeats_the_last_element(kind: Any) -> None:
    assert as_lists(shares(kind([1, 2, 3, 4, 5]), 3, pad=True)) == [[1, 2], [3, 4], [5, 5]]
    assert as_lists(shares(kind([7]), 3, pad=True)) == [[7], [7], [7]]
    assert as_lists(shares(kind([7]), 3)) == [[7], [], []]


@pytest.mark.parametrize("kind", [list, tuple, lambda items: torch.tensor(items), np.array])
def test_nothing_splits_into_nothing(kind: Any) -> None:
    assert as_lists(shares(kind([]), 2, pad=True)) == [[], []]
    assert shares({}, 2, pad=True) == [{}, {}]


def test_rows_of_a_matrix_are_split_and_padded() -> None:
    rows = torch.arange(6).reshape(3, 2)
    first, second = shares(rows, 2, pad=True)
    assert torch.equal(first, rows[:2])
    assert torch.equal(second, rows[[2, 2]])


def test_a_nested_dict_is_split_by_the_length_of_its_leaves_and_left_alone() -> None:
    inputs = {"a": {"x": [1, 2, 3], "y": {"z": ("p", "q", "r")}}, "b": torch.arange(3)}
    before = copy.deepcopy(inputs)
    first, second = shares(inputs, 2)
    assert first["a"] == {"x": [1, 2], "y": {"z": ("p", "q")}}
    assert second["a"] == {"x": [3], "y": {"z": ("r",)}}
    assert second["b"].tolist() == [2]
    assert inputs["a"] == before["a"]
    assert torch.equal(inputs["b"], before["b"])


def test_order_of_a_dict_is_kept() -> None:
    assert list(share_of(OrderedDict(b=[1, 2], a=[3, 4]), 0, 2)) == ["b", "a"]


def test_another_mapping_keeps_its_class_and_is_left_alone() -> None:
    tokens = UserDict(input_ids=torch.arange(6).reshape(3, 2), text=["a", "b", "c"])  # as a BatchEncoding is
    first, second = shares(tokens, 2, pad=True)
    assert type(second) is UserDict
    assert (first["text"], second["text"], tokens["text"]) == (["a", "b"], ["c", "c"], ["a", "b", "c"])
    assert second["input_ids"].tolist() == [[4, 5], [4, 5]]


def test_leaves_of_unlike_length_are_named() -> None:
    with pytest.raises(DataError, match=r"inputs\['a'\] has 2, inputs\['b'\]\['c'\] has 3"):
        share_of({"a": [1, 2], "b": {"c": [1, 2, 3]}}, 0, 2)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("value", ["text", b"bytes", range(4), {1, 2}, 3, None, Pair([1], [2]), iter([1])])
def test_split_between_processes_refuses_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match=f"inputs is a {type(value).__name__}"):
        share_of(value, 0, 2)
    with pytest.raises(TypeError, match=r"inputs\['a'\] is a"):
        share_of({"a": value}, 0, 2)


def test_a_tensor_without_dimensions_is_refused() -> None:
    with pytest.raises(DataError, match="no first dimension"):
        share_of(torch.tensor(1), 0, 2)


@given(length=st.integers(0, 40), count=st.integers(1, 7), pad=st.booleans())
def test_every_element_is_taken_once_in_order(length: int, count: int, pad: bool) -> None:
    parts = shares(list(range(length)), count, pad)
    elements = list(chain.from_iterable(parts))
    assert elements[:length] == list(range(length))
    if pad:
        assert len({len(part) for part in parts}) == 1
        assert set(elements[length:]) <= {length - 1}
    else:
        assert len(elements) == length


def test_a_process_alone_takes_all() -> None:
    with PartialState(cpu=True).split_between_processes([1, 2, 3], apply_padding=True) as part:
        assert part == [1, 2, 3]
