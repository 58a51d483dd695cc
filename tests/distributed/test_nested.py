from __future__ import annotations

import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from instep.distributed import (
    concatenate,
    convert_to_fp32,
    find_batch_size,
    find_device,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from instep.distributed.nested import iter_leaves, map_leaves, tensor_leaves
from instep.errors import DataError

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    names: list[str]


def double(leaf: Any) -> Any:
    return leaf * 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (3, 6),
        ([1, (2, 3)], [2, (4, 6)]),
        (Pair(1, [2]), Pair(2, [4])),
        ({"a": 1, 2: {"b": 3}}, {"a": 2, 2: {"b": 6}}),
        (OrderedDict(b=1, a=2), OrderedDict(b=2, a=4)),
        (defaultdict(list, a=1), defaultdict(list, a=2)),
        (UserDict(a=1), UserDict(a=2)),
        ([], []),
        ({}, {}),
    ],
)
def test_structure_and_types_are_kept(data: Any, expected: Any) -> None:
    result = map_leaves(double, data)
    assert result == expected
    assert type(result) is type(data)


def test_nothing_is_changed_in_place() -> None:
    data = {"a": [torch.ones(2)], "b": UserDict(c=torch.ones(2)), "d": Batch(torch.ones(2), ["n"])}
    result = map_leaves(double, data)
    assert [float(leaf[0]) for _, leaf in iter_leaves(data) if isinstance(leaf, torch.Tensor)] == [1.0, 1.0, 1.0]
    assert isinstance(result["d"], Batch)
    assert result["d"].names == ["nn"]
    assert isinstance(map_leaves(double, defaultdict(list))["new"], list)


def test_paths_of_leaves() -> None:
    assert dict(iter_leaves({"a": [1, (2,)], "b": Batch(torch.ones(1), ["n"])}))["['a'][1][0]"] == 2
    assert [where for where, _ in iter_leaves(Batch(torch.ones(1), ["n"]))] == [".x", ".names[0]"]
    assert [where for where, _ in iter_leaves(torch.ones(1))] == [""]


def test_tensors_move_and_the_rest_stays() -> None:
    class Movable:
        moved_to: Any = None

        def to(self, device: Any) -> Movable:
            self.moved_to = device
            return self

    data = {
        "x": torch.ones(2),
        "rest": [Pair(torch.ones(1), "name"), None, 3],
        "own": Movable(),
        "batch": Batch(torch.ones(1), []),
    }
    result = send_to_device(data, "meta")
    assert result["x"].device.type == "meta"
    assert result["rest"][0].a.device.type == "meta"
    assert result["rest"][0].b == "name"
    assert result["rest"][1:] == [None, 3]
    assert result["own"].moved_to == "meta"
    assert result["batch"].x.device.type == "meta"
    assert data["x"].device.type == "cpu"
    packed = send_to_device(pack_sequence([torch.ones(2), torch.ones(1)]), "cpu", non_blocking=True)
    assert isinstance(packed, PackedSequence)


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(2)
    assert send_to_device([tensor], "cpu")[0] is tensor


def test_parameters_are_leaves_too() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert map_leaves(double, [parameter])[0].tolist() == [2.0, 2.0]
    assert send_to_device(parameter, "meta").device.type == "meta"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (torch.ones(3, 2), 3),
        ({"step": 7, "names": ["a"], "x": (torch.ones(4),)}, 4),
        ([torch.tensor(1.0), torch.ones(5)], 5),
        (torch.tensor(1.0), None),
        ({"a": "b"}, None),
        ([], None),
        (torch.empty(0, 2), 0),
    ],
)
def test_batch_size_is_the_first_tensors(data: Any, expected: int | None) -> None:
    assert find_batch_size(data) == expected


def test_what_is_no_tensor_is_named() -> None:
    assert [where for where, _ in tensor_leaves({"a": torch.ones(1), "b": None}, "gather")] == ["['a']"]
    with pytest.raises(DataError, match=r"gather takes tensors, but got a str at \['a'\]\[1\].*gather_object"):
        tensor_leaves({"a": [torch.ones(1), "x"]}, "gather")
    with pytest.raises(DataError, match=r"broadcast takes tensors, but got a int\. .*broadcast_object"):
        tensor_leaves(3, "broadcast")


def test_concatenate_joins_leaf_by_leaf() -> None:
    first = {"x": torch.ones(2, 3), "rest": [torch.tensor(1), None]}
    second = {"x": torch.zeros(1, 3), "rest": [torch.tensor(2), None]}
    joined = concatenate([first, second, first])
    assert joined["x"].shape == (5, 3)
    assert joined["x"][:, 0].tolist() == [1, 1, 0, 1, 1]
    assert joined["rest"][0].tolist() == [1, 2, 1]
    assert joined["rest"][1] is None
    assert first["x"].shape == (2, 3)
    assert concatenate([torch.ones(2, 1), torch.zeros(2, 2)], dim=-1).tolist() == [[1, 0, 0]] * 2
    assert concatenate([(torch.empty(0, dtype=torch.bool),)])[0].dtype is torch.bool
    pairs = concatenate([Pair(torch.ones(1), torch.ones(1))] * 2)
    assert type(pairs) is Pair


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "empty list"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], r"entry 0 has tensors at .*'a'.*but entry 1 at .*'b'"),
        ([[torch.ones(1), None], [None, torch.ones(1)]], "but entry 1"),
        ([{"a": torch.ones(1, 2)}, {"a": torch.ones(1, 3)}], r"at \['a'\] have shapes \[\(1, 2\), \(1, 3\)\]"),
        ([torch.ones(1, 2), torch.ones(2)], "all dimensions but 0 must agree"),
        ([["text"], ["text"]], "concatenate takes tensors, but got a str"),
    ],
)
def test_concatenate_says_what_does_not_fit(data: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        concatenate(data)


@pytest.mark.parametrize(("shape", "dim"), [((), 1), ((), -1), ((2,), 1), ((2, 3), -3), ((2, 3), 2)])
def test_concatenate_refuses_a_dimension_that_a_tensor_lacks(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(DataError, match=rf"at \['a'\] has shape {re.escape(str(shape))}, and so no dimension {dim}"):
        concatenate([{"a": torch.ones(shape)}] * 2, dim=dim)


def test_slice_tensors_takes_rows_and_leaves_the_rest() -> None:
    data = {"x": torch.arange(6).reshape(3, 2), "n": torch.tensor(1), "names": ["a", None], "empty": torch.empty(0, 2)}
    part = slice_tensors(data, slice(1, 3))
    assert part["x"].tolist() == [[2, 3], [4, 5]]
    assert part["n"] is data["n"]
    assert part["names"] == ["a", None]
    assert part["empty"].shape == (0, 2)
    assert len(data["x"]) == 3


def test_small_helpers_of_accelerate() -> None:
    data = {"a": [torch.ones(2, 2, dtype=torch.bfloat16), 1], "b": "text"}
    assert listify(data) == {"a": [[[1.0, 1.0], [1.0, 1.0]], 1], "b": "text"}
    assert convert_to_fp32(data)["a"][0].dtype == torch.float32
    assert find_device(data) == torch.device("cpu")
    assert find_device(["text"]) is None
    assert recursively_apply(torch.add, {"x": torch.ones(1)}, 2)["x"].item() == 3.0
    assert recursively_apply(str.upper, ["a", 1], test_type=lambda leaf: isinstance(leaf, str)) == ["A", 1]
    with pytest.raises(TypeError, match=r"Unsupported types \(<class 'int'>\) passed to `neg`"):
        recursively_apply(torch.neg, (torch.ones(1), 1), error_on_other_type=True)
    assert concatenate(["text"]) == "text"


@pytest.mark.parametrize(("size", "processes", "padded"), [(1, 2, 2), (3, 2, 4), (4, 4, 4), (61, 6, 66), (2, 6, 6)])
def test_a_batch_is_padded_to_a_multiple_of_the_processes(size: int, processes: int, padded: int) -> None:
    batch = torch.ones(size, 3)
    result = pad_input_tensors(batch, size, processes)
    assert result.shape == (padded, 3)
    assert result.sum() == batch.sum()
