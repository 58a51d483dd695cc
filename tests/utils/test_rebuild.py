"""Modules from the hyperparameters of a checkpoint: what becomes of each value, and what a stranger's cannot do."""

from __future__ import annotations

import collections
import json
import logging
import os
import shelve
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, IntEnum
from functools import partial
from pathlib import Path, PosixPath
from typing import Annotated, Any, Literal, NamedTuple

import pytest
import torch
from jsonargparse.typing import path_type
from torch import nn
from torch.distributions import Distribution, Normal
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from instep.errors import CheckpointError
from instep.utils.hparams import plain_values
from instep.utils.named import Named
from instep.utils.rebuild import build_configured, configured_arguments, with_structures
from tests.helpers.spawn import run_command

REPO = Path(__file__).parents[2]


class Kind(Enum):
    SLOW = "slow"
    FAST = "fast"


class Level(IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: float = 0.0


class Typed(int):
    """A number of a kind of its own."""


OfJsonargparse: Any = path_type("fc")


class PathWithCode(PosixPath):
    """As the paths of other packages, which find a file system by the text."""


@dataclass
class Options:
    rate: float
    kind: Kind = Kind.SLOW
    inner: Options | None = None
    free: Any = None
    names: list[str] = field(default_factory=list)


class Holder(nn.Module):
    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value


def holder_of(hint: Any) -> type:
    """A module whose argument is of this type."""

    class Of(Holder):
        def __init__(self, value=None) -> None:
            super().__init__(value)

    Of.__init__.__annotations__["value"] = hint
    return Of


def built(hint: Any, value: Any) -> Any:
    return build_configured(holder_of(hint), {"_class_path": "gone.Net", "value": value}, {}).value


@pytest.mark.parametrize(
    ("hint", "saved", "expected"),
    [
        (int, 3, 3),
        (int, "3", 3),
        (float, 3, 3.0),
        (float, "1e-3", 1e-3),
        (bool, True, True),
        (str, "3", "3"),
        (int | None, None, None),
        (int, None, None),
        (int | str, "3", "3"),
        (bool | int, 1, 1),
        (float | int, 1, 1),
        (str | Path, "a/b", "a/b"),
        (Path | str, "a/b", Path("a/b")),
        (Path | None, "a/b", Path("a/b")),
        (complex, "(1+2j)", 1 + 2j),
        (torch.dtype, "torch.float16", torch.float16),
        (torch.device, "cpu", torch.device("cpu")),
        (Kind, "FAST", Kind.FAST),
        (Level, 1, Level.LOW),
        (Literal["a", 1], "a", "a"),
        (Annotated[float, "unit"], 1, 1.0),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[int, str], [1, "x"], (1, "x")),
        (list[Path], ["a"], [Path("a")]),
        (Sequence[float], [1], [1.0]),
        (set[int], [1, 1], {1}),
        (dict[int, Kind], {"1": "SLOW"}, {1: Kind.SLOW}),
        (Mapping[str, tuple[int, int]], {"a": [1, 2]}, {"a": (1, 2)}),
        (Options, {"rate": 1, "kind": "FAST", "names": ["1"]}, Options(1.0, Kind.FAST, None, None, ["1"])),
        (Options | None, {"rate": 1, "inner": {"rate": 2}}, Options(1.0, inner=Options(2.0))),
        (Any, {"a": ["1", "[2]", {"b": "c.d"}]}, {"a": ["1", "[2]", {"b": "c.d"}]}),
        (type[nn.Module], "torch.nn.ReLU", nn.ReLU),
        (Callable[..., Any], "torch.nn.functional.relu", functional.relu),
        (Callable[..., Any], "torch.tanh", torch.tanh),
    ],
)
def test_plain_values_become_what_the_type_says(hint: Any, saved: Any, expected: Any) -> None:
    value = built(hint, saved)
    assert value == expected
    assert type(value) is type(expected)


def test_objects_are_built_where_the_type_admits_one() -> None:
    spec = {"class_path": "torch.nn.LayerNorm", "init_args": {"normalized_shape": [2, 3], "eps": 1}}
    for hint in (nn.Module, Any, nn.Module | str, list[nn.Module], dict[str, Any]):
        value = built(hint, [spec] if hint == list[nn.Module] else {"a": spec} if hint == dict[str, Any] else spec)
        value = value[0] if isinstance(value, list) else value["a"] if isinstance(value, dict) else value
        assert isinstance(value, nn.LayerNorm)
        assert (tuple(value.normalized_shape), value.eps) == ((2, 3), 1.0)
    later = built(Callable[[int], nn.Module], {"class_path": "torch.nn.Linear", "init_args": {"out_features": 3}})
    assert isinstance(later, partial)
    assert later(2).weight.shape == (3, 2)
    optimizer = built(
        Callable[[Iterable[Any]], torch.optim.Optimizer], {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}
    )
    assert optimizer([nn.Parameter(torch.ones(1))]).defaults["lr"] == 1
    stays = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}  # without parameters it cannot be built
    assert built(Any, stays) == built(dict[str, Any], stays) == stays


@pytest.mark.parametrize(
    "mine",
    [nn.ReLU(), Point(1, 2), [1], (1, [2]), collections.defaultdict(list, a=[1]), {"class_path": "os.system"}, "1.5"],
)
@pytest.mark.parametrize("hint", [Any, int])
def test_what_the_caller_passes_stays_as_it_is(hint: Any, mine: Any) -> None:
    saved = {"_class_path": "gone.Net", "value": "x"}
    assert build_configured(holder_of(hint), saved, {"value": mine}).value is mine
    with pytest.raises(CheckpointError, match="unexpected keyword argument 'valu'"):
        build_configured(holder_of(hint), saved, {"value": mine, "valu": mine})


@pytest.mark.parametrize(
    ("hint", "saved"),
    [
        (int, "1.5"),
        (int, 1.5),
        (float, "fast"),
        (bool, "1"),
        (str, 3),
        (Kind, "SLOWER"),
        (Literal["a"], "b"),
        (tuple[int, int], [1]),
        (Options, {"rate": 1, "other": 2}),
        (torch.dtype, "torch.load"),
        (PathWithCode, "s3://bucket/x"),
        (Typed, "1"),
        (OfJsonargparse, "a"),
        (bytes, "YQ=="),
        (timedelta, "1 day, 2:03:04"),
        (collections.deque, [1]),
        (Point, [1, 2]),
        (Holder, {"value": 1}),
        (nn.Module, "torch.nn.ReLU"),
        (nn.Module, {"class_path": "torch.optim.SGD", "init_args": {}}),
        (type[nn.Module], "torch.optim.SGD"),
        (type[nn.Module], "torch.tanh"),
        (type, "torch.tanh"),
        (type, "subprocess.Popen"),
        (Callable[..., Any], "torch.nn.functional.handle_torch_function"),
        (Callable[..., Any], "torch.jit.ScriptModule"),
        (Any, {"class_path": "os.system", "other": 1}),
        (dict[str, Any], {"class_path": "os.system", "init_args": {"command": "x"}}),
        (nn.Module, {"class_path": "torch.nn.ReLU", "init_args": "{}"}),
    ],
)
def test_a_saved_value_that_does_not_fit_its_type_is_refused(hint: Any, saved: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^the checkpoint's value is a .*[Pp]ass value=\.\.\."):
        built(hint, saved)


@dataclass
class Narrow:
    width: int = 1

    def __post_init__(self) -> None:
        if self.width > 8:
            raise LookupError("too wide")


class Takes:
    def __init__(self, net: Narrow, depth: int = 1) -> None: ...


def test_a_dataclass_is_made_of_the_dict_that_was_saved() -> None:
    assert with_structures(Takes, {"net": {"width": 3}, "depth": 2}) == {"net": Narrow(3), "depth": 2}
    for wrong, says in (({"width": 9}, "too wide"), ({"height": 1}, "which is no Narrow")):
        with pytest.raises(CheckpointError, match=rf"^the checkpoint's net .*{says}.*Pass net=\.\.\."):
            with_structures(Takes, {"net": wrong})


class Crossed(Enum):
    LEFT = "RIGHT"
    RIGHT = "LEFT"


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Kind, "GONE"),
        (Crossed, "LEFT"),
        (torch.dtype, "no_dtype"),
        (tuple[int, int], [1]),
        (dict[str, Kind], {"a": "b"}),
    ],
)
def test_json_that_stands_for_nothing_of_its_type_is_no_text_in_its_place(hint: Any, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^the checkpoint's value is a .*Pass value=\.\.\."):
        with_structures(holder_of(hint), {"value": value}, of_json=True)
    assert with_structures(holder_of(hint | None), {"value": None}, of_json=True) == {"value": None}


class Shape:
    """No module, optimizer or scheduler."""


class Round(Shape): ...


def area(of: Any, unit: str = "m") -> Any:
    return of, unit


@dataclass
class Drawing:
    first: type[Shape] = Round
    others: list[type[Shape]] = field(default_factory=list)
    how: Any = area


def returned(hint: Any, default: Any, value: Any) -> Any:
    """What a class with such an argument gets of a value that was saved."""

    class Of:
        def __init__(self, value=default, other: type[os.PathLike[str]] = subprocess.Popen) -> None: ...

    Of.__init__.__annotations__["value"] = hint
    saved = plain_values({"value": value})
    [plain, configured] = with_structures(Of, saved), configured_arguments(Of, {"_class_path": "gone.Net", **saved})
    assert repr(plain) == repr(configured)
    return plain["value"]


@pytest.mark.parametrize(
    ("hint", "default", "value"),
    [
        (type[Shape], None, Round),
        (type[Shape] | None, None, Shape),
        (list[type[Shape]], (), [Round, Shape]),
        (dict[str, type[Shape]], None, {"a": Round}),
        (Callable[..., Shape], None, Round),
        (Callable[..., Any], None, area),
        (Any, Round, Round),
        (Any, (1, {"a": Round}), [Round]),
        (Any, partial(Round), Round),
        (Any, subprocess.Popen, subprocess.Popen),
        (type[Dataset], None, TensorDataset),
        (type[Distribution], None, Normal),
        (str | type[nn.Module], "relu", nn.GELU),
        (Drawing, None, Drawing(Round, [Round, Shape])),
        (Any, None, {"fn": functional.relu, nn.Linear: torch.exp}),
    ],
)
def test_classes_and_functions_are_found_where_the_class_says_that_it_takes_them(
    hint: Any, default: Any, value: Any
) -> None:
    assert returned(hint, default, value) == value


@pytest.mark.parametrize(
    ("default", "value"),
    [
        (area, partial(area, unit="km")),
        (None, partial(nn.LayerNorm, eps=0.5)),
        (None, partial(functional.elu, alpha=2)),
    ],
)
def test_a_partial_is_made_again_of_what_the_class_takes(default: Any, value: Any) -> None:
    found = returned(Any, default, value)
    assert (found.func, found.args, found.keywords) == (value.func, value.args, value.keywords)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        *((hint, subprocess.Popen) for hint in (Any, object, type, type[Any], type[object], type[Shape], Shape)),
        *((hint, subprocess.Popen) for hint in (Callable, Callable[..., object], AbstractContextManager)),
        (type[AbstractContextManager], subprocess.Popen),
        (type[collections.abc.MutableMapping], shelve.DbfilenameShelf),
        (type[logging.Handler], logging.FileHandler),
        (type[nn.Module], torch.fx.graph_module._CodeOnlyModule),
        (Any, Round),
        (Any, torch.from_file),
        (Any, partial(area, unit="km")),
        (Any, partial(subprocess.Popen, "ls")),
        (Any, [{"deep": {eval: 1}}]),
    ],
)
def test_no_other_class_or_function_is_reached(hint: Any, value: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint's value is a .*Pass value=\.\.\. to load_from_checkpoint"
    ):
        returned(hint, None, value)


def test_a_name_imports_nothing() -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(
        CheckpointError, match=r"value is a antigravity\.fly, which this program has not imported.*value=\.\.\."
    ):
        with_structures(holder_of(Any), {"value": [Named("antigravity.fly")]})
    assert "antigravity" not in sys.modules


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_strangers_values_open_import_load_and_build_nothing(tmp_path: Path) -> None:
    """Some 8,000 hyperparameters, over ten types of argument, and some by a checkpoint and `--ckpt_path` too."""
    every = ["every"] if os.environ.get("INSTEP_STRANGERS_EVERY") else []
    argv = [sys.executable, "-W", "ignore", "-m", "tests.trainer.stranger_hparams", str(tmp_path), *every]
    done = run_command(argv, cwd=REPO, timeout_s=380.0 if not every else 7200.0)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["broken"] == 0, "\n".join(result["first"])
    assert result["kept"]
    assert result["tried"] > 5000
    assert result["built"] > 1000, "texts that stay texts are no error"
