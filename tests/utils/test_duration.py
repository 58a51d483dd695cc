from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from instep.errors import SettingError
from instep.utils.duration import parse_duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("00:00:00:01", 1),
        (" 01:02:03:04 ", 93784),
        (timedelta(minutes=1.5), 90),
        ({"hours": 1, "minutes": 1}, 3660),
    ],
)
def test_parse_duration(value: Any, seconds: float):
    assert parse_duration("max_time", value) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value",
    ["12:00:00", "1:2:3:x", "1:2:3:4", "", "00:00:00:00", 60, None, {"hour": 1}, {"hours": float("nan")},
     {"days": 10**12}, timedelta(seconds=-1), timedelta(0), {}],
)  # fmt: skip
def test_parse_duration_refuses(value: Any):
    with pytest.raises(SettingError, match=r"max_time=.*DD:HH:MM:SS"):
        parse_duration("max_time", value)
