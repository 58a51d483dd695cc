"""Checks of settings: what they accept, read from text and say."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
import pytest

from instep.errors import SettingError
from instep.utils.checks import (
    DEVICES,
    FLAG,
    SECONDS,
    TEXT,
    at_least,
    check_fields,
    checks_of,
    choice,
    parse_duration,
)


@dataclass
class Plan:
    every: Annotated[int, at_least(1, "every step")] = 8
    port: Annotated[int | None, at_least(1, most=65535)] = None
    kind: Annotated[str, choice("norm", "value")] = "norm"


def test_a_dataclass_carries_its_checks() -> None:
    checks = checks_of(Plan)
    assert list(checks) == ["every", "port", "kind"]
    assert checks["every"]("every", np.int64(3)) == 3
    with pytest.raises(SettingError, match=r"^every=0: expected an integer of at least 1 \(every step\)\.$") as error:
        checks["every"]("every", 0)
    assert (error.value.field, error.value.got) == ("every", 0)
    with pytest.raises(SettingError, match="port=65536: expected an integer from 1 to 65535"):
        checks["port"]("port", 65536)
    with pytest.raises(
        SettingError, match=r"kind='norms' is not known\. Use one of: norm, value\. Did you mean 'norm'"
    ):
        checks["kind"]("kind", "norms")


@pytest.mark.parametrize(
    ("check", "text", "value"),
    [(at_least(0), "3", 3), (SECONDS, "1.5", 1.5), (SECONDS, "inf", float("inf")), (FLAG, "Yes", True),
     (FLAG, "0", False), (TEXT, "a", "a"), (DEVICES, "all", -1), (DEVICES, "0, 1", (0, 1)), (DEVICES, "0,", (0,)),
     (DEVICES, "2", 2)],
)  # fmt: skip
def test_checks_read_their_values_from_text(check: Any, text: str, value: Any) -> None:
    got = check.from_text("x", text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("check", "value"),
    [(at_least(1), True), (at_least(1), 1.0), (SECONDS, float("nan")), (SECONDS, 0), (SECONDS, 10**400), (FLAG, 1),
     (SECONDS, Fraction(10**400)), (TEXT, 1), (DEVICES, [0, 0]), (DEVICES, ()), (DEVICES, "0,0"), (DEVICES, True)],
)  # fmt: skip
def test_wrong_values_are_refused(check: Any, value: Any) -> None:
    with pytest.raises(SettingError, match=r"^x="):
        check("x", value)


@pytest.mark.parametrize(("check", "text"), [(at_least(1), "two"), (at_least(1), "1" * 5000), (FLAG, "maybe")])
def test_texts_of_another_kind_are_refused(check: Any, text: str) -> None:
    with pytest.raises(SettingError, match=r"^x="):
        check.from_text("x", text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("00:00:00:01", 1),
        (" 01:02:03:04 ", 93784),
        (timedelta(minutes=1.5), 90),
        ({"hours": 1, "minutes": 1}, 3660),
    ],
)
def test_durations_are_parsed_from_texts_and_timedeltas(value: Any, seconds: float):
    assert parse_duration("max_time", value) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value",
    ["12:00:00", "1:2:3:x", "1:2:3:4", "", "00:00:00:00", 60, None, {"hour": 1}, {"hours": float("nan")},
     {"days": 10**12}, timedelta(seconds=-1), timedelta(0), {}],
)  # fmt: skip
def test_wrong_durations_are_refused(value: Any):
    with pytest.raises(SettingError, match=r"max_time=.*DD:HH:MM:SS"):
        parse_duration("max_time", value)


@dataclass(frozen=True)
class Fields:
    """Settings of which one may be None and one has no check."""

    steps: Annotated[int, at_least(1)] = 8
    limit: Annotated[int | None, at_least(1)] = None
    free: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_fields_are_checked_and_kept_in_their_resolved_form() -> None:
    fields = Fields(np.int64(3), free=[])  # pyright: ignore[reportArgumentType]
    assert (type(fields.steps), fields.steps, fields.limit, fields.free) == (int, 3, None, [])
    assert Fields(limit=2).limit == 2


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": None}, {"limit": 0}, {"limit": True}])
def test_wrong_fields_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as caught:
        Fields(**wrong)
    assert {caught.value.field: caught.value.got} == wrong
