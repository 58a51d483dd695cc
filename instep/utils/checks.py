"""Checks of settings: a check is a function that takes a setting's name and value and returns the final value.

A dataclass of settings has checks in the annotations of its fields, as in `steps: Annotated[int, at_least(1)]`;
`checks_of` collects them. Any such function can be a check. A `Check` object can also read the value from text, and has
a JSON schema.
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
    """Make the SettingError for a value that has the wrong type or is out of range."""
    return SettingError(f"{name}={got!r}: expected {expected}.", field=name, got=got)


def constructor_call(cls: type) -> str:
    """Format a call of a class's constructor with its required arguments, for error messages.

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
    """Return True for an integer (also of numpy) of at least `least`, but False for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and (least is None or int(value) >= least)


def is_number(value: Any) -> bool:
    """Return True for a real number except NaN, but False for a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Check:
    """Check for the value of a setting: call it with the setting's name and the value to get the final value.

    Args:
        holds: function that returns True if a value is valid.
        expected: description of valid values, for the error message.
        resolve: function that converts a valid value to its final form.
        read: function that converts text (of an environment variable or command line) to a value; raises ValueError for
            invalid text.
        schema: JSON schema of valid values.
        choices: all valid values, if they are a few names.

    Raises:
        SettingError: (when called) the value is not valid.
    """

    holds: Callable[[Any], bool]
    expected: str
    resolve: Callable[[Any], Any] = _same
    read: Callable[[str], Any] = _same
    schema: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()

    def __call__(self, name: str, value: Any) -> Any:
        with suppress(ValueError, OverflowError):  # an integer with too many digits makes `holds` raise an error
            if self.holds(value):
                return self.resolve(value)
        raise one_of(name, value, self.choices) if self.choices else wrong(name, value, self.expected)

    def from_text(self, name: str, text: str) -> Any:
        """Convert the text of an environment variable or command line to a value, and check the value."""
        try:
            value = self.read(text)
        except ValueError:
            raise wrong(name, text, self.expected) from None
        return self(name, value)


def at_least(least: int, meaning: str = "", most: int | None = None) -> Check:
    """Make a check for an integer of at least `least`; `meaning` explains a special value in the error message."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Check(
        lambda value: is_int(value, least) and (most is None or value <= most),
        f"an integer {bounds}{meaning and f' ({meaning})'}",
        int,
        int,
        {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})},
    )


def above_zero(what: str) -> Check:
    """Make a check for a number above 0; `what` completes "expected a number ..." in the error message."""
    return Check(
        lambda value: is_number(value) and value > 0,
        f"a number {what}",
        float,
        float,
        {"type": "number", "exclusiveMinimum": 0},
    )


def check_object(field: str, value: Any, kind: type[T], other: str = "") -> T:
    """Check that a value is an object of the class `kind`, and return it.

    Args:
        field: name of the setting.
        value: value of the setting.
        kind: the class, which belongs to instep.
        other: description of further valid values, for the error message.

    Raises:
        SettingError: the value is another object, or a class. For an object of Lightning or Accelerate, the message
            says what to use instead.
    """
    if isinstance(value, type) and issubclass(value, kind):
        raise wrong(field, value, f"an object, not the class: write {constructor_call(value)}")
    if not isinstance(value, kind):
        raise wrong(field, value, f"{other}an instep {kind.__name__}, got {_a(value)}")
    return value


def _a(value: Any) -> str:
    """Describe the type of a value in words, with an article.

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
    """Make a check for a value that must be one of a few names."""
    return Check(
        lambda value: isinstance(value, str) and value in names,
        "one of a few names",
        schema={"type": "string", "enum": list(names)},
        choices=names,
    )


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read_flag(text: str) -> bool:
    """Convert "1", "true", "yes" or "on" to True, and "0", "false", "no" or "off" to False; else raise ValueError."""
    if text.lower() not in _SWITCH:
        raise ValueError
    return _SWITCH[text.lower()]


FLAG = Check(lambda value: isinstance(value, bool), "True or False", read=read_flag, schema={"type": "boolean"})


def read_indices(text: str) -> int | str | list[int]:
    """Convert the text of a `devices` setting, such as "2", "all" (-1), "auto" or "0,1"; else raise ValueError."""
    text = text.strip()
    if text in ("auto", "all"):
        return -1 if text == "all" else text
    parts = [part.strip() for part in text.split(",")]
    if not any(parts) or not all(re.fullmatch(r"-?\d+", part) for part in parts if part):
        raise ValueError
    numbers = [int(part) for part in parts if part]
    return numbers if "," in text else numbers[0]


def _devices(value: Any) -> int | str | tuple[int, ...] | None:
    """Return the final form of a `devices` setting; None if the value is not valid."""
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
"""Check of `devices`: a number, -1 for all, "auto", or indices, each also as text; indices become a tuple."""


_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")


def parse_duration(field: str, value: Any, or_zero: bool = False) -> timedelta:
    """Convert a duration, in one of the forms that users write, to a timedelta, and check that it is positive.

    Args:
        field: name of the argument, for the error message.
        value: "DD:HH:MM:SS", a timedelta, or a dict of timedelta's keyword arguments.
        or_zero: whether zero is a valid duration; it may also be given as the number 0.

    Raises:
        SettingError: the value has another form, or is not above zero.

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
    """Make a check that accepts None, and otherwise calls `check`."""
    return lambda name, value: None if value is None else check(name, value)


def checks_of(settings: type) -> dict[str, Callable[[str, Any], Any]]:
    """Return a dict from the names of a dataclass's fields to the checks in their annotations.

    Example::

        @dataclass
        class Plan:
            every: Annotated[int, at_least(1)] = 8

        checks_of(Plan)["every"]("every", 3)
    """
    hints = get_type_hints(settings, include_extras=True)
    return {name: get_args(hint)[1] for name, hint in hints.items() if get_origin(hint) is Annotated}


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass, and replace each value by its final form; call it in `__post_init__`.

    A field whose default is None may have the value None.

    Raises:
        SettingError: a value is not valid.
    """
    for name, check in checks_of(type(settings)).items():
        value, default = getattr(settings, name), getattr(type(settings), name, ...)
        if value is not None or default is not None:
            object.__setattr__(settings, name, check(name, value))  # works for frozen dataclasses too


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(field: str, text: str | int, least: int = 1) -> int:
    """Convert a size such as "5GB" or "200 MiB" to a number of bytes; an integer is returned unchanged.

    Raises:
        SettingError: the text is not a size, or the size is below `least`.

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
