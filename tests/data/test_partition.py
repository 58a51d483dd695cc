"""Which samples a batch has, by table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.data.partition import Splitter
from instep.errors import DataError


def tensor(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float).view(shape)


def images(count: int, channels: int = 3) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((channels, 2, 2), float(number)) for number in range(count))


def plain(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.tolist()
    return type(data)(map(plain, data)) if isinstance(data, (list, tuple)) else data


CASES = {  # the batch, its known size, whether it must have it, the samples found, the part from the second sample on
    "tensor": (tensor(3), 3, True, 3, tensor(2) + 1),
    "tensor of unknown size": (tensor(3), None, False, 3, tensor(2) + 1),
    "short last batch": (tensor(3), 4, False, 3, tensor(2) + 1),
    "columns": ([tensor(3), torch.arange(3)], 3, True, 3, [tensor(2) + 1, torch.arange(1, 3)]),
    "as many columns as samples": ([tensor(2), torch.arange(2)], 2, True, 2, [tensor(1) + 1, torch.arange(1, 2)]),
    "text": (["a", "b", "c"], 3, True, 3, ["b", "c"]),
    "text of unknown size": (["a", "b", "c"], None, False, 3, ["b", "c"]),
    "two columns of text": ([("a", "b", "c"), ("x", "y", "z")], 3, True, 3, [("b", "c"), ("y", "z")]),
    "samples of two texts": ([("a", "x"), ("b", "y"), ("c", "z")], 3, True, 3, [("b", "y"), ("c", "z")]),
    "long samples, short last batch": ([[1] * 5, [2] * 5, [3] * 5], 4, False, 3, [[2] * 5, [3] * 5]),
    "images and labels": ((images(4), (0, 1, 2, 3)), 4, True, 4, (images(4)[1:], (1, 2, 3))),
    "two images, two labels": ((images(2), (0, 1)), 2, True, 2, (images(2)[1:], (1,))),
    "images and labels of unknown size": ((images(4), (0, 1, 2, 3)), None, False, 4, (images(4)[1:], (1, 2, 3))),
    "images": (list(images(4)), 4, True, 4, list(images(4)[1:])),
    "samples of an image and a label": ([(images(1)[0], 5)] * 2, 2, True, 2, [(images(1)[0], 5)]),
    "samples of a name, short last batch": (
        {"a": [("a", "b", "c"), ("x", "y", "z")]},
        2,
        False,
        2,
        {"a": [("x", "y", "z")]},
    ),
    "a note beside": ([tensor(3), "whole", ["two", "notes"]], 3, True, 3, [tensor(2) + 1, "whole", ["two", "notes"]]),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_of_every_form_are_counted_and_divided(case: str) -> None:
    batch, size, exact, rows, rest = CASES[case]
    splitter = Splitter()
    assert splitter.count(batch, size, exact) == rows
    assert plain(splitter.part(batch, rows, 1, rows)) == plain(rest)


REFUSED = {
    "columns or samples": ([("a", "b", "c"), ("x", "y", "z")], None, False),
    "columns or samples of a name": ({"a": [("a", "b", "c"), ("x", "y", "z")]}, None, False),
    "columns or samples, short": ([("a", "b", "c"), ("x", "y", "z")], 4, False),
    "as many columns as samples": ([("a", "b"), ("x", "y")], 2, True),
    "as many images as channels": ((images(3), (0, 1, 2)), 3, True),
    "too long": (tensor(12), 4, False),
    "too short": (tensor(3), 4, True),
    "another size": ([("a", "b", "c"), ("x", "y", "z")], 4, True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_of_unknown_size_is_refused_not_guessed(case: str) -> None:
    batch, size, exact = REFUSED[case]
    splitter = Splitter()
    with pytest.raises(DataError, match="dispatch_batches=False"):
        splitter.part(batch, splitter.count(batch, size, exact), 0, 1)


def test_torch_collation_makes_columns() -> None:
    splitter = Splitter(columns=True)
    for size, exact in ((2, True), (3, False), (None, False)):
        assert splitter.count([("a", "b"), ("x", "y")], size, exact) == 2
    assert splitter.part([("a", "b"), ("x", "y")], 2, 1, 2) == [("b",), ("y",)]


def test_a_short_batch_is_read_as_the_full_ones_before() -> None:
    splitter = Splitter()
    for count, exact in ((4, True), (3, False)):
        batch = (images(count), tuple(range(count)))
        assert splitter.count(batch, 4, exact) == count
        assert plain(splitter.part(batch, count, 1, 2)) == plain((images(2)[1:], (1,)))


LISTS = {"texts": ["de", "en"], "numbers": [3, 4], "pairs of texts": [("a", "b"), ("c", "d")], "a tuple": ("de", "en")}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_was_no_column_is_left_whole_in_a_batch_of_its_length(name: str) -> None:
    splitter, note = Splitter(), LISTS[name]
    for count in (4, 3, 2):
        batch = {"x": tensor(count), "all": {"plain": note, "deeper": {"of": note}}}
        assert splitter.part(batch, splitter.count(batch, 4), 1, count)["all"] == {
            "plain": note,
            "deeper": {"of": note},
        }


def test_a_list_that_was_a_column_and_is_none_later_is_refused() -> None:
    splitter = Splitter()
    splitter.part({"x": tensor(2), "languages": ["de", "en"]}, 2, 0, 1)
    with pytest.raises(DataError, match="a list had an item for each sample before, and has 2"):
        splitter.part({"x": tensor(1), "languages": ["de", "en"]}, 1, 0, 1)


def test_tensors_in_the_place_of_a_list_that_was_no_column_are_columns() -> None:
    splitter = Splitter()
    splitter.part({"x": tensor(3), "more": ["two", "notes"]}, 3, 0, 1)
    assert plain(splitter.part([tensor(2), [tensor(2)]], 2, 0, 1)) == [[0.0], [[0.0]]]
    assert plain(splitter.part({"x": tensor(3), "more": [tensor(3)]}, 3, 0, 1)["more"]) == [[0.0]]


@pytest.mark.parametrize(
    ("batch", "rows", "message"),
    [
        ({"x": tensor(3), "y": tensor(2)}, 3, r"a batch of 3 samples has a Tensor of shape \(2,\)"),
        ({"x": tensor(3), "more": [tensor(2), tensor(2)]}, 3, r"a batch of 3 samples has a Tensor of shape \(2,\)"),
        (5, None, "its batch, a int, has no tensor and no list to split"),
    ],
)
def test_what_has_another_number_of_rows_is_refused_also_in_a_list(batch: Any, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Splitter().part(batch, rows, 0, 1)
