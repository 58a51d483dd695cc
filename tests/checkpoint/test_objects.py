"""Enum members, random generators and dates: as they were, and never by code that a checkpoint names."""

from __future__ import annotations

import enum
import json
import random
import sys
from datetime import date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from instep.checkpoint import decode, encode
from instep.errors import CheckpointError, CorruptCheckpointError, UnsavableStateError
from tests.helpers import gpu


class Colour(enum.Enum):
    RED = 1
    ROT = 1  # noqa: PIE796  an alias
    BLUE = (2, "b")


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class NotAnEnum:
    RED = 1
    _member_map_ = {"RED": 1}


def round_trip(tree: Any) -> Any:
    json_tree, tensors = encode(tree, "the state")
    return decode(json.loads(json.dumps(json_tree, allow_nan=False)), tensors)


@pytest.mark.parametrize("member", [Colour.RED, Colour.ROT, Colour.BLUE, Rights.WRITE])
def test_an_enum_member_is_the_very_same(member: enum.Enum) -> None:
    assert round_trip([member])[0] is member
    assert round_trip({member: 1}) == {member: 1}
    assert round_trip({member}) == {member}


class Holder:
    class Mode(enum.Enum):
        FAST = "fast"


def test_an_enum_in_a_class_is_found() -> None:
    assert round_trip(Holder.Mode.FAST) is Holder.Mode.FAST


def test_enums_that_cannot_be_found_again_are_refused() -> None:
    class Local(enum.Enum):
        A = 1

    with pytest.raises(UnsavableStateError, match=r"the state\['mode'\] is .*Local.*define it at the top of a module"):
        round_trip({"mode": Local.A})
    with pytest.raises(UnsavableStateError, match="a combination of flags; save its value"):
        round_trip(Rights.READ | Rights.WRITE)


def enum_node(module: Any, kind: Any, name: Any = "RED") -> dict[str, Any]:
    return {"$": "enum", "v": name, "module": module, "class": kind}


@pytest.mark.parametrize(
    ("module", "kind", "name"),
    [
        ("os", "system", "RED"),
        ("os", "path.join", "RED"),
        ("builtins", "eval", "RED"),
        (__name__, "NotAnEnum", "RED"),
        (__name__, "Gone", "RED"),
        (__name__, "Colour.RED", "RED"),
        (__name__, "Colour.__init__.__globals__", "RED"),
        (__name__, "", "RED"),
        ("no.such.module", "Colour", "RED"),
    ],
)
def test_only_enums_are_looked_up(module: str, kind: str, name: str) -> None:
    with pytest.raises(CheckpointError, match="no such enum here") as caught:
        decode(enum_node(module, kind, name), {})
    assert f"{kind}.{name} of the module {module}" in str(caught.value)


@pytest.mark.parametrize("name", ["GREEN", "__class__", "mro", "_member_map_"])
def test_only_members_are_looked_up(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such member; it has RED, ROT, BLUE"):
        decode(enum_node(__name__, "Colour", name), {})


def test_nothing_is_imported_for_a_checkpoint() -> None:
    assert "this" not in sys.modules
    assert "antigravity" not in sys.modules
    for module in ("this", "antigravity"):
        with pytest.raises(CheckpointError, match="Import that module before"):
            decode(enum_node(module, "Colour"), {})
        assert module not in sys.modules


def test_a_modules_own_getattr_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "__getattr__", asked.append, raising=False)
    with pytest.raises(CheckpointError):
        decode(enum_node(__name__, "Lazy"), {})
    assert asked == []


@pytest.mark.parametrize(
    ("module", "kind", "name"), [([], "x", "RED"), ("os", 3, "RED"), (__name__, "Colour", ["RED"])]
)
def test_what_is_no_name_is_damage(module: Any, kind: Any, name: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode(enum_node(module, kind, name), {})


def test_pythons_generator_goes_on_where_it_was() -> None:
    generator = random.Random(7)
    generator.gauss(0, 1)  # it keeps a second value back
    back = round_trip({"r": generator})["r"]
    assert type(back) is random.Random
    assert [back.gauss(0, 1) for _ in range(3)] == [generator.gauss(0, 1) for _ in range(3)]
    assert back.getstate() == generator.getstate()
    assert back is not generator


@pytest.mark.parametrize("bits", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_numpys_generators_go_on_where_they_were(bits: str) -> None:
    for kind in (np.random.Generator, np.random.RandomState):
        generator = kind(getattr(np.random, bits)(3))
        generator.standard_normal(5)
        generator.integers(9, dtype=np.uint32) if kind is np.random.Generator else generator.randint(9)
        back = round_trip([generator])[0]
        assert type(back) is kind
        assert np.array_equal(back.standard_normal(4), generator.standard_normal(4))


def test_torchs_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(4)
    torch.rand(3, generator=generator)
    back = round_trip((generator,))[0]
    assert type(back) is torch.Generator
    assert back.device == generator.device
    assert back.initial_seed() == generator.initial_seed()
    assert torch.equal(torch.rand(5, generator=back), torch.rand(5, generator=generator))


@pytest.mark.gpu
def test_a_devices_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator(gpu.DEVICE).manual_seed(4)
    torch.rand(3, generator=generator, device=gpu.DEVICE)
    back = round_trip(generator)
    assert back.device == generator.device
    assert torch.equal(
        torch.rand(5, generator=back, device=gpu.DEVICE), torch.rand(5, generator=generator, device=gpu.DEVICE)
    )


def test_a_generator_of_a_device_that_is_not_here_is_named() -> None:
    tree, tensors = encode(torch.Generator())
    tree["device"] = "cuda:63"
    with pytest.raises(CheckpointError, match=r"a torch\.Generator of cuda:63, which this process does not have"):
        decode(tree, tensors)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "random.Random", "v": [3, [1, 2], None]},
        {"$": "random.Random", "v": 3},
        {"$": "random.Random", "v": [3, ["x"] * 625, None]},
        {"$": "numpy.Generator", "v": {"bit_generator": "seed"}},
        {"$": "numpy.Generator", "v": {"bit_generator": "__class__"}},
        {"$": "numpy.Generator", "v": {"bit_generator": "PCG64", "state": 1}},
        {"$": "numpy.RandomState", "v": {"bit_generator": ["PCG64"]}},
        {"$": "torch.Generator", "v": [1, 2], "device": "cpu"},
        {"$": "torch.Generator", "v": [1, 2], "device": "../x"},
        {"$": "date", "v": [2020, 13, 1]},
        {"$": "date", "v": "2020"},
        {"$": "datetime", "v": [2020, 1, 1], "fold": 7, "offset_s": None},
        {"$": "datetime", "v": [2020, 1, 1], "fold": 0, "offset_s": 1e9},
        {"$": "datetime", "v": [2020, 1, 1]},
    ],
    ids=lambda node: node["$"],
)
def test_a_damaged_object_is_said_to_be_one(node: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        decode({"x": [node]}, {})


@pytest.mark.parametrize(
    "when",
    [
        date(2024, 2, 29),
        datetime(1, 1, 1),
        datetime(2024, 2, 29, 23, 59, 59, 999_999),
        datetime(2024, 10, 27, 2, 30, fold=1),
        datetime(2024, 5, 1, tzinfo=timezone.utc),
        datetime(2024, 5, 1, 8, tzinfo=timezone(timedelta(hours=-3, minutes=-30, microseconds=-7))),
    ],
)
def test_dates_come_back_exactly(when: Any) -> None:
    back = round_trip([when])[0]
    assert type(back) is type(when)
    assert back == when
    if isinstance(when, datetime):
        assert (back.utcoffset(), back.fold) == (when.utcoffset(), when.fold)


def test_a_zone_with_rules_is_refused() -> None:
    with pytest.raises(UnsavableStateError, match=r"astimezone\(datetime.timezone.utc\)"):
        round_trip(datetime(2024, 5, 1, tzinfo=ZoneInfo("Europe/Berlin")))


def test_generators_of_ones_own_kind_are_refused() -> None:
    class Mine(random.Random):
        pass

    for generator in (Mine(1), random.SystemRandom()):
        with pytest.raises(UnsavableStateError, match="getstate"):
            round_trip(generator)
