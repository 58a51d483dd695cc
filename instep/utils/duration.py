"""Times as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from instep.errors import SettingError

_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")


def parse_duration(field: str, value: Any) -> timedelta:
    """Parse a positive time.

    Args:
        field: the argument's name, for the error's text.
        value: "DD:HH:MM:SS", a timedelta, or its keyword arguments as a dict.

    Raises:
        SettingError: it is none of these, or not above zero.

    Example:
        >>> parse_duration("max_time", "00:01:30:00") == parse_duration("max_time", {"minutes": 90})
        True
    """
    time, reason = value, ""
    clock = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    if clock is not None:
        time = dict(zip(("days", "hours", "minutes", "seconds"), map(int, clock.groups()), strict=True))
    if isinstance(time, Mapping):
        try:
            time = timedelta(**time)
        except (TypeError, ValueError, OverflowError) as error:
            reason = f" ({error})"
    if not isinstance(time, timedelta) or time <= timedelta(0):
        raise SettingError(
            f"{field}={value!r}: expected a time above zero: 'DD:HH:MM:SS', a timedelta, or a dict like "
            f"{{'hours': 1, 'minutes': 30}}{reason}.",
            field=field,
            got=value,
        )
    return time
