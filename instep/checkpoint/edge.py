"""Errors of readers: any error that a file's content causes becomes one checkpoint error with the path.

A table of kinds describes the values that a file must hold, so that they are checked before use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from torch import distributed

from instep.errors import CheckpointError, CorruptCheckpointError, InstepError

Kind: TypeAlias = "Callable[[Any], bool]"


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn errors of the `with` block into checkpoint errors.

    It is for code that reads values from a file without checking them, where a wrong value may cause any error. The
    original error is the cause of the new one.

    Args:
        path: the file or folder.
        what: what is wrong, for the text, such as "is not a whole file of torch.save".

    Raises:
        CheckpointError: the file cannot be read, or needs more memory than there is.
        CorruptCheckpointError: for any other error; errors of instep are raised unchanged.
    """
    try:
        yield
    # BrokenPipeError: a program that reads the output, such as `head`, has closed it
    except (InstepError, BrokenPipeError):
        raise
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}", path=path) from error
    except MemoryError as error:
        raise CheckpointError(f"{path} needs more memory than there is", path=path) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        raise CorruptCheckpointError(f"{path} {what}: {type(error).__name__}: {reason}", path=path) from error


@contextmanager
def loading_state(path: Path, what: str) -> Iterator[None]:
    """Turn errors of an object that loads its state into checkpoint errors.

    Args:
        path: the checkpoint.
        what: name of the object, for the text.

    Raises:
        CorruptCheckpointError: for any error that a wrong state causes. Errors of instep and of the system are raised
            unchanged; with several ranks RuntimeError too, since it may come from the end of another rank.
    """
    try:
        yield
    except (InstepError, OSError):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and distributed.is_available() and distributed.is_initialized():
            raise
        reason = " ".join(str(error).split())[:500]
        raise CorruptCheckpointError(
            f"{path} holds a state of {what} that cannot be taken up: {type(error).__name__}: {reason}. Resume from "
            "another checkpoint, or leave that part out by resume=Resume(...).",
            path=path,
        ) from error


# Checks of the type of a value. An error text says "expected" and the name of the check.


def count(value: Any) -> bool:
    """Return True if a value is a count from 0 that fits into 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """Return True if a value is a number that fits into a float, including nan and infinity."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)


def finite(value: Any) -> bool:
    """Return whether a value is a number that is neither nan nor infinite."""
    return number(value) and math.isfinite(value)


def mapping(value: Any) -> bool:
    """Return whether a value is a dict."""
    return isinstance(value, dict)


def named(value: Any) -> bool:
    """Return True if a value is a dict with texts as keys."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def anything(_: Any) -> bool:
    """Accept any value."""
    return True


def none_or(kind: Kind) -> Kind:
    """Make a check for None or a value of a kind."""
    return _called(f"None or {kind.__name__}", lambda value: value is None or kind(value))


def list_of(kind: Kind) -> Kind:
    """Make a check for a list or tuple of values of a kind."""
    return _called(f"list of {kind.__name__}", lambda value: isinstance(value, list | tuple) and all(map(kind, value)))


def dict_of(kind: Kind) -> Kind:
    """Make a check for a dict with texts as keys and values of a kind."""
    return _called(f"dict of {kind.__name__}", lambda value: named(value) and all(map(kind, value.values())))


def check(value: Any, table: Mapping[str, Kind], what: str, optional: Mapping[str, Kind] | None = None) -> None:
    """Check a dict by a table of kinds.

    Args:
        value: dict to check; it may have keys that are not in the table.
        table: kind of each required key.
        what: name of the value in errors.
        optional: kind of each key that may be missing.

    Raises:
        ValueError: the dict does not fit; the text names the key and its value.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a {type(value).__name__}, where a dict is expected")
    missing = [key for key in table if key not in value]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    for key, kind in {**table, **(optional or {})}.items():
        if key in value and not kind(value[key]):
            short = repr(value[key])[:80]
            raise ValueError(f"{what} has {key}={short}, where a {kind.__name__} is expected")


def _called(name: str, kind: Kind) -> Kind:
    kind.__name__ = name
    return kind
