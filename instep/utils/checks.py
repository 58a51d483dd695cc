"""Checks of settings: a check is a callable of a setting's name and value that returns the value in resolved form.

A dataclass of settings annotates its fields with checks, as in `steps: Annotated[int, at_least(1)]`; `checks_of`
collects them. Any callable of this form is a check. A `Check` also reads text, and describes itself to programs.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Integral, Real
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from instep.errors import SettingError, one_of

T = TypeVar("T")


def wrong(name: str, got: Any, expected: str) -> SettingError:
    """Make the error for a value of the wrong type or out of range."""
    return SettingError(f"{name}={got!r}: expected {expected}.", field=name, got=got)


def constructor_call(cls: type) -> str:
    """Format a call that makes an object of a class, with its required arguments.

    Example:
        >>> constructor_call(Check)
        'Check(holds=..., expected=...)'
    """
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # some builtin classes have no signature
        parameters = []
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return f"{cls.__name__}({', '.join(f'{p.name}=...' for p in needed)})"


def is_int(value: Any, least: int | None = None) -> bool:
    """Return True for an integer of at least `least`, also numpy's, but not for a bool such as `max_steps=True`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and (least is None or int(value) >= least)


def is_number(value: Any) -> bool:
    """Return True for a real number that is neither a bool nor NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Check:
    """Check of one kind of value; call it with the setting's name and the value.

    Args:
        holds: whether a value is right.
        expected: what a right value is, for the error.
        resolve: turns a right value into the form that is kept.
        read: turns the text of a variable or a command line into a value; ValueError where it is none.
        schema: the JSON schema of right values.
        choices: the names that are right, where there are few.

    Raises:
        SettingError: when called with a wrong value.
    """

    holds: Callable[[Any], bool]
    expected: str
    resolve: Callable[[Any], Any] = _same
    read: Callable[[str], Any] = _same
    schema: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()

    def __call__(self, name: str, value: Any) -> Any:
        with suppress(ValueError, OverflowError):  # for a number with too many digits
            if self.holds(value):
                return self.resolve(value)
        raise one_of(name, value, self.choices) if self.choices else wrong(name, value, self.expected)

    def from_text(self, name: str, text: str) -> Any:
        """Read and check the text of a variable or a command line."""
        try:
            value = self.read(text)
        except ValueError:
            raise wrong(name, text, self.expected) from None
        return self(name, value)


def at_least(least: int, meaning: str = "", most: int | None = None) -> Check:
    """Make a check for an integer of at least `least`; `meaning` explains the special value in the error."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Check(
        lambda value: is_int(value, least) and (most is None or value <= most),
        f"an integer {bounds}{meaning and f' ({meaning})'}",
        int,
        int,
        {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})},
    )


def above_zero(what: str) -> Check:
    """Make a check for a number above 0; `what` says in the error text what the number counts."""
    return Check(
        lambda value: is_number(value) and value > 0,
        f"a number {what}",
        float,
        float,
        {"type": "number", "exclusiveMinimum": 0},
    )


def check_object(field: str, value: Any, kind: type[T], other: str = "") -> T:
    """Check that a value is of a class of instep, and return it; `other` names further allowed values in errors.

    Raises:
        SettingError: it is another object, or the class itself. Of a class of Lightning or Accelerate it has a hint.
    """
    if isinstance(value, type) and issubclass(value, kind):
        raise wrong(field, value, f"an object, not the class: write {constructor_call(value)}")
    if not isinstance(value, kind):
        raise wrong(field, value, f"{other}an instep {kind.__name__}, got {_a(value)}")
    return value


def _a(value: Any) -> str:
    """Describe the kind of a value, with its article.

    Example:
        >>> _a(3), _a(int), _a(None)
        ('an object of the class int', 'the class int', 'None')
    """
    if value is None:
        return "None"
    return (
        f"the class {value.__name__}" if isinstance(value, type) else f"an object of the class {type(value).__name__}"
    )


SECONDS = above_zero("of seconds above 0, or float('inf') for no limit")
TEXT = Check(lambda value: isinstance(value, str), "a text", schema={"type": "string"})
PATH = Check(
    lambda value: isinstance(value, str | os.PathLike) and bool(os.fspath(value)),
    "the path of a folder, as a text or a pathlib.Path",
)
METRIC = Check(lambda value: isinstance(value, str) and value != "", 'the name of a logged metric, such as "val_loss"')


def choice(*names: str) -> Check:
    """Make a check for one of a few names."""
    return Check(
        lambda value: isinstance(value, str) and value in names,
        "one of a few names",
        schema={"type": "string", "enum": list(names)},
        choices=names,
    )


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read_flag(text: str) -> bool:
    """Read "1", "true", "yes" or "on" as True and their opposites as False; ValueError for other text."""
    if text.lower() not in _SWITCH:
        raise ValueError
    return _SWITCH[text.lower()]


FLAG = Check(lambda value: isinstance(value, bool), "True or False", read=read_flag, schema={"type": "boolean"})


def read_indices(text: str) -> int | str | list[int]:
    """Read "2", "all" (as -1), "auto" or "0,1"; ValueError for other text."""
    text = text.strip()
    if text in ("auto", "all"):
        return -1 if text == "all" else text
    parts = [part.strip() for part in text.split(",")]
    if not any(parts) or not all(re.fullmatch(r"-?\d+", part) for part in parts if part):
        raise ValueError
    numbers = [int(part) for part in parts if part]
    return numbers if "," in text else numbers[0]


def _devices(value: Any) -> int | str | tuple[int, ...] | None:
    """Return the resolved form of a `devices` setting; None if the value is not one."""
    if isinstance(value, str):
        try:
            value = read_indices(value)
        except ValueError:
            return None
    if isinstance(value, list | tuple):
        right = value and len(set(value)) == len(value) and all(is_int(index, 0) for index in value)
        return tuple(int(index) for index in value) if right else None
    if is_int(value):
        return int(value) if value >= 1 or value == -1 else None
    return value if value == "auto" else None


DEVICES = Check(
    lambda value: _devices(value) is not None,
    "at least 1, 'auto', -1 for all, or indices that differ, such as 0,1; without a GPU accelerator='cpu'",
    _devices,
    schema={
        "anyOf": [
            {"type": "integer"},
            {"const": "auto", "type": "string"},
            {"type": "array", "items": {"type": "integer", "minimum": 0}},
        ]
    },
)
"""The check for a number of devices, -1 for all, "auto", or indices, also as text; indices become a tuple."""


_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")


def parse_duration(field: str, value: Any, or_zero: bool = False) -> timedelta:
    """Check a positive time in the forms that users write.

    Args:
        field: the argument's name, for the error's text.
        value: "DD:HH:MM:SS", a timedelta, or its keyword arguments as a dict.
        or_zero: no time at all is right too, also as the number 0.

    Raises:
        SettingError: it is none of these, or not above zero.

    Example:
        >>> parse_duration("max_time", "00:01:30:00") == parse_duration("max_time", {"minutes": 90})
        True
    """
    time, reason = timedelta(0) if is_int(value) and value == 0 else value, ""
    clock = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    if clock is not None:
        time = dict(zip(("days", "hours", "minutes", "seconds"), map(int, clock.groups()), strict=True))
    if isinstance(time, Mapping):
        try:
            time = timedelta(**time)
        except (TypeError, ValueError, OverflowError) as error:
            reason = f" ({error})"
    if not isinstance(time, timedelta) or time < timedelta(0) or (not time and not or_zero):
        form = "the format DD:HH:MM:SS, a timedelta, or a dict like {'hours': 1, 'minutes': 30}"
        raise wrong(field, value, f"{'zero or a time above it' if or_zero else 'a time above zero'}: {form}{reason}")
    return time


def or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Make a check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def checks_of(settings: type) -> dict[str, Callable[[str, Any], Any]]:
    """Collect the checks in the annotations of a dataclass's fields; other fields have none.

    Example::

        @dataclass
        class Plan:
            every: Annotated[int, at_least(1)] = 8

        checks_of(Plan)["every"]("every", 3)
    """
    hints = get_type_hints(settings, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass in its `__post_init__`; each gets the resolved form of its value.

    A field whose default is None may be None.

    Raises:
        SettingError: a value is wrong.
    """
    for name, check in checks_of(type(settings)).items():
        value, default = getattr(settings, name), getattr(type(settings), name, ...)
        if value is not None or default is not None:
            object.__setattr__(settings, name, check(name, value))  # works for a frozen dataclass too


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(field: str, text: str | int, least: int = 1) -> int:
    """Read bytes from a text such as 5GB or 200 MiB; a number is returned as it is.

    Raises:
        SettingError: the text is no size, or below `least`.

    Example:
        >>> parse_size("max_shard_size", "1.5GB")
        1500000000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|)\s*", str(text).upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else -1
    if size < least:
        raise SettingError(
            f"{field}={text!r} is no size: give a number with a unit, such as 5GB", field=field, got=text
        )
    return size
