"""Checks of single settings: each takes a field's name and value, and returns the value in its one resolved form."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from instep.errors import SettingError, one_of
from instep.state.device import KINDS
from instep.utils.duration import parse_duration
from instep.utils.paths import local_path

ACCELERATORS = ("auto", "gpu", *KINDS)


def wrong(field: str, got: Any, expected: str) -> SettingError:
    """The error for a value of the wrong type or out of range."""
    return SettingError(f"{field}={got!r}: expected {expected}.", field=field, got=got)


def is_int(value: Any) -> bool:
    """An integer, numpy's too, but not a bool: `max_steps=True` is a slip, not one step."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A real number that is not a bool and not NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def flag(field: str, value: Any) -> bool:
    """True or False, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise wrong(field, value, "True or False")
    return value


def at_least(least: int, meaning: str = "") -> Callable[[str, Any], int]:
    """A check for an integer of at least `least`; `meaning` explains the special value in the error."""

    def check(field: str, value: Any) -> int:
        if not is_int(value) or value < least:
            raise wrong(field, value, f"an integer of at least {least}{meaning and f' ({meaning})'}")
        return int(value)

    return check


def limit(field: str, value: Any) -> int | float:
    """How much of a loader: an int counts batches, a float is a fraction, so 1 is one batch and 1.0 is all."""
    if is_int(value) and value >= 0:
        return int(value)
    if isinstance(value, float) and 0.0 <= value <= 1.0:
        return value
    hint = f"; for {int(value)} batches write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
    raise wrong(field, value, f"a number of batches (int, 0 or more) or a fraction (float, 0.0 to 1.0){hint}")


def val_check_interval(field: str, value: Any) -> int | float | timedelta:
    """A fraction of the epoch (float), a number of training batches (int), or a wall time."""
    if is_int(value) and value >= 1:
        return int(value)
    if isinstance(value, float) and 0.0 < value <= 1.0:
        return value
    if isinstance(value, str | timedelta | Mapping):
        return parse_duration(field, value)
    raise wrong(
        field,
        value,
        "training batches (int, at least 1), a fraction of the epoch (float, above 0.0 to 1.0) or a time "
        "('DD:HH:MM:SS', timedelta or dict). limit_val_batches=0 turns validation off",
    )


def clip_value(field: str, value: Any) -> float:
    """A positive number."""
    if not is_number(value) or value <= 0:
        raise wrong(field, value, "a number above 0, or None for no clipping")
    return float(value)


def seconds(field: str, value: Any) -> float:
    """A positive number of seconds; infinity for no limit."""
    if not is_number(value) or value <= 0:
        raise wrong(field, value, "a number of seconds above 0, or float('inf') for no limit")
    return float(value)


def choice(*allowed: str) -> Callable[[str, Any], str]:
    """A check for one of a few names."""

    def check(field: str, value: Any) -> str:
        if value not in allowed:
            raise one_of(field, value, allowed)
        return value

    return check


def accelerator(field: str, value: Any) -> str:
    """A known accelerator name."""
    if value not in ACCELERATORS:
        raise one_of(field, value, ACCELERATORS)
    return value


def devices(field: str, value: Any) -> int | str | tuple[int, ...]:
    """How many devices (an int, -1 for all, "auto"), or which ones (a list, or a str with commas)."""
    given = value
    if isinstance(value, str):
        value = value.strip()
        if value == "auto":
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(re.fullmatch(r"-?\d+", part) for part in parts if part):
            raise wrong(field, given, "'auto', a number, -1 for all, or a list of device indices")
        numbers = [int(part) for part in parts if part]
        value = numbers if "," in value or not numbers else numbers[0]
    if is_int(value) and (value >= 1 or value == -1):
        return int(value)
    if is_int(value) and value == 0:
        raise wrong(field, given, "at least one device; to train without a GPU use accelerator='cpu'")
    if isinstance(value, list | tuple) and value and all(is_int(index) and index >= 0 for index in value):
        if len(set(value)) != len(value):
            raise wrong(field, given, "device indices that differ")
        return tuple(int(index) for index in value)
    raise wrong(field, given, "'auto', a number, -1 for all, or a list of device indices")


def deterministic(field: str, value: Any) -> bool | str:
    """True, False or "warn"."""
    if value == "warn" or isinstance(value, bool):
        return value
    raise wrong(field, value, "True, False or 'warn'")


def folder(field: str, value: Any) -> Path:
    """A folder on a file system of this machine."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise wrong(field, value, "the path of a folder")
    if "://" in str(value):
        raise wrong(field, value, "the path of a folder; checkpoints may go to a URL, by ModelCheckpoint(dirpath=...)")
    return local_path(value)


def plugins(kind: type) -> Callable[[str, Any], tuple[Any, ...]]:
    """A check for one object of a class, or a list of them; it gives a tuple."""

    def check(field: str, value: Any) -> tuple[Any, ...]:
        items = tuple(value) if isinstance(value, list | tuple | set) else (value,)
        for item in items:
            if isinstance(item, type):
                raise wrong(field, item, f"an object, not the class: write {item.__name__}()")
            if not isinstance(item, kind):
                raise wrong(field, item, f"an instep {kind.__name__} or a list of them, got a {type(item).__name__}")
        return items

    return check
