from __future__ import annotations

import enum
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.checkpoint import decode, encode
from instep.errors import CorruptCheckpointError, UnsavableStateError
from instep.utils.named import Named


def round_trip(tree: Any) -> Any:
    json_tree, tensors = encode(tree)
    text = json.dumps(json_tree, allow_nan=False)
    return decode(json.loads(text), tensors)


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()
    elif isinstance(expected, np.generic):
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert len(got) == len(expected)
        for (key, value), (other_key, other) in zip(got.items(), expected.items(), strict=True):
            assert_same(key, other_key)
            assert_same(value, other)
    elif isinstance(expected, (list, tuple, deque)):
        assert len(got) == len(expected)
        for value, other in zip(got, expected, strict=True):
            assert_same(value, other)
    elif isinstance(expected, complex):
        assert_same(got.real, expected.real)
        assert_same(got.imag, expected.imag)
    elif isinstance(expected, float):
        assert math.copysign(1.0, got) == math.copysign(1.0, expected)
        assert got == expected or (math.isnan(got) and math.isnan(expected))
    else:
        assert got == expected


_keys = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.sampled_from(["$", "v", "", "__metadata__", "a.b"]),
    st.floats(allow_nan=False),
    st.binary(max_size=4),
    st.tuples(st.integers(), st.text(max_size=3)),
)
_leaves = st.one_of(
    _keys,
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.timedeltas(),
    st.integers(min_value=2**64, max_value=2**200),
    st.text(alphabet=st.characters(), max_size=5),
    st.sets(st.one_of(st.integers(), st.text(max_size=3)), max_size=4),
    st.frozensets(st.integers(), max_size=4),
    st.lists(st.integers(), max_size=3).map(lambda v: deque(v, maxlen=5)),
    st.sampled_from(
        [torch.float8_e5m2, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]), range(1, 9, 2)]
    ),
    st.lists(st.integers(min_value=-5, max_value=5), max_size=4).map(lambda v: torch.tensor(v, dtype=torch.int16)),
    st.floats(width=32, allow_nan=False).map(torch.tensor),
    st.lists(st.floats(width=16), max_size=4).map(lambda v: np.array(v, dtype=np.float16)),
    st.floats(width=32).map(np.float32),
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_keys, inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_trees)
def test_any_tree_comes_back_exactly(tree: Any) -> None:
    assert_same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        -float("nan"),
        float("-inf"),
        -0.0,
        0.0,
        5e-324,
        complex(float("nan"), float("inf")),
        1 << 20_000,
        True,
        Path("/a/b c"),
        PurePosixPath("x/y"),
        PureWindowsPath("C:\\x"),
        bytearray(b"\x00\xff"),
        Counter({2: 3, 5: 1}),
        defaultdict(list, {1: [2]}),
        defaultdict(None, {"x": 1}),
        deque([1, (2,)], maxlen=4),
        {"$": "tuple", "v": [1]},
        {1: "int", "1": "str"},
        {(1, 2): {None: b"x"}},
        "\ud800 lone surrogate",
        random.Random(3).getstate(),
        np.random.default_rng(1).bit_generator.state,
        Named("torch.optim.Adam"),
        Named("<f.<lambda>>", (1, Named("a.b")), {"betas": (1, 2)}),
        torch.Size([]),
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.arange(6).reshape(2, 3).t(),
    ],
    ids=lambda value: f"{type(value).__name__}-{type(value).__module__}",
)
def test_a_value_comes_back_exactly(value: Any) -> None:
    assert_same(round_trip({"x": value})["x"], value)
    assert_same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6)[::-2],
        np.array(3, dtype=np.uint16),
        np.zeros((0, 2), dtype=np.complex64),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[s]"),
        np.array([1.5], dtype=np.longdouble),
        np.float64("nan"),
        np.int8(-3),
        np.bool_(True),
        np.str_(""),
        np.str_("é"),
        np.complex128(1 - 2j),
        np.timedelta64(3, "D"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype}",
)
def test_numpy_comes_back_exactly(value: Any) -> None:
    assert_same(round_trip([value])[0], value)


def test_a_read_only_array_is_no_warning_and_comes_back_writable() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert round_trip(array).flags.writeable


def test_a_default_factory_still_works() -> None:
    back = round_trip(defaultdict(list))
    back["new"].append(1)
    assert back == {"new": [1]}


def test_str_and_int_enums_become_what_they_equal() -> None:
    class Mode(str, enum.Enum):
        MIN = "min"

    assert round_trip([Mode.MIN, enum.IntFlag("F", "A B").B]) == ["min", 2]
    assert round_trip({Mode.MIN: 1}) == {"min": 1}


def test_a_parameter_becomes_its_tensor_without_a_copy() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    _, tensors = encode({"w": parameter})
    assert type(tensors["w"]) is torch.Tensor
    assert tensors["w"].data_ptr() == parameter.data_ptr()


def test_tensor_keys_are_paths_and_never_collide() -> None:
    one = torch.ones(1)
    _, tensors = encode({"a.b": one, "a": {"b": one * 2}, "__metadata__": one * 3, "s": [one]})
    assert list(tensors) == ["a.b", "a.b~2", "__metadata__~2", "s.0"]


def test_plain_json_stays_readable() -> None:
    tree = {"lr": 0.1, "groups": [{"params": [0, 1], "foreach": None, "name": "é"}]}
    assert encode(tree) == (tree, {})


Point = namedtuple("Point", "x y")


@dataclass
class Record:
    x: int = 1


class Text(str):
    pass


class Fraction:
    def __repr__(self) -> str:
        return "Fraction"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Point(1, 2), "save Point._asdict()"),
        (Record(), "dataclasses.asdict"),
        (Text("x"), "a subclass of str; save str(...)"),
        (Fraction(), "save tensors, numbers, strings"),
        (Fraction, "which is code"),
        (len, "which is code"),
        (lambda: 0, "which is code"),
        (torch.nn.Linear(1, 1), "save its state_dict()"),
        (np.array([object()]), "of dtype object"),
        (np.zeros(2, dtype=[("a", "i4")]), "save plain arrays of numbers"),
        (defaultdict(lambda: 0), "a defaultdict of"),
        (torch.empty(2, device="meta"), "on the meta device"),
        (torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
        (torch.nn.parameter.UninitializedParameter(), "a tensor subclass, UninitializedParameter"),
        ({torch.ones(1): 1}, "a tensor in a dict key"),
        ({torch.ones(1)}, "a tensor in a set"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20],
)
def test_what_cannot_be_saved_is_refused_with_its_path(value: Any, hint: str) -> None:
    with pytest.raises(UnsavableStateError) as caught:
        encode({"meter": [0, value]}, "callbacks['EMA']")
    assert str(caught.value).startswith("callbacks['EMA']['meter'][1]")
    assert hint in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(UnsavableStateError, match="a quantized tensor"):
        encode(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_a_cycle_is_refused_and_a_shared_list_is_not() -> None:
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]
    shared.append(shared)  # type: ignore[arg-type]
    with pytest.raises(UnsavableStateError, match=r"the state\['a'\]\[1\] is a container that contains itself"):
        encode({"a": shared})


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "os.system", "v": "true"},
        {"$": "tensor", "v": "missing"},
        {"$": "torch.dtype", "v": "load"},
        {"$": "torch.dtype", "v": "no_such"},
        {"$": "bytes", "v": "é"},
        {"$": "tuple"},
        {"$": "tuple", "v": 3},
        {"$": ["tuple"], "v": []},
        {"$": "defaultdict", "v": [], "of": "eval"},
        {"$": "raw array", "v": "AAAA", "dtype": "O", "shape": [1]},
        {"$": "raw array", "v": "AAAA", "dtype": "<f8", "shape": [9]},
        {"$": "scalar", "v": "AAAA", "dtype": "no"},
        {"$": "dict", "v": [[[1], 2]]},
        {"$": "named", "v": "os.system"},
        {"$": "named", "v": [1, None, None]},
        {"$": "named", "v": ["os.system", "ls", None]},
        {"$": "named", "v": ["os.system", [], {"$": "dict", "v": [[1, 2]]}]},
    ],
    ids=str,
)
def test_a_damaged_or_malicious_tree_is_an_error(tree: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be decoded"):
        decode([tree], {})
