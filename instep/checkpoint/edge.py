"""Errors at the edge of readers: whatever a file's content makes their code raise becomes one error with the path.

A table of kinds says what values a file must hold, and is checked at once.
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

    For code that takes values out of a file as they come: what of it is of the wrong kind shows as any error. The cause
    stays at the new one.

    Args:
        path: the file or folder.
        what: what could not be done with it, as in "is not a whole file of torch.save".

    Raises:
        CheckpointError: it cannot be read, or needs more memory than there is.
        CorruptCheckpointError: anything else but an error of instep's, which passes as it is.
    """
    try:
        yield
    except (InstepError, BrokenPipeError):  # the program that reads the output, such as `head`, has closed it
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
    """Turn errors of an object that takes up its state into one of the checkpoint.

    Args:
        path: the checkpoint.
        what: whose state it is.

    Raises:
        CorruptCheckpointError: for what a state of the wrong kind makes of the code behind it. Errors of instep's and
            of the system pass as they are; so does RuntimeError among several ranks: it may be another rank's end.
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


# Whether a value is of a kind; the name of the function is what errors say was expected.


def count(value: Any) -> bool:
    """Return whether a value is a count, from 0 on, that 64 bits hold."""
    return type(value) is int and 0 <= value < 2**63


def text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """Return whether a value is True or False."""
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold, nan and infinite ones too."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)


def finite(value: Any) -> bool:
    """Return whether a value is a number that is neither nan nor infinite."""
    return number(value) and math.isfinite(value)


def mapping(value: Any) -> bool:
    """Return whether a value is a dict."""
    return isinstance(value, dict)


def named(value: Any) -> bool:
    """Return whether a value is a dict with texts for keys."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def anything(_: Any) -> bool:
    """Accept any value."""
    return True


def none_or(kind: Kind) -> Kind:
    """Make the kind of None, or a value of a kind."""
    return _called(f"None or {kind.__name__}", lambda value: value is None or kind(value))


def list_of(kind: Kind) -> Kind:
    """Make the kind of a list or tuple of values of a kind."""
    return _called(f"list of {kind.__name__}", lambda value: isinstance(value, list | tuple) and all(map(kind, value)))


def dict_of(kind: Kind) -> Kind:
    """Make the kind of a dict with texts for keys and values of a kind."""
    return _called(f"dict of {kind.__name__}", lambda value: named(value) and all(map(kind, value.values())))


def check(value: Any, table: Mapping[str, Kind], what: str, optional: Mapping[str, Kind] | None = None) -> None:
    """Hold a dict against a table.

    Args:
        value: what is held against it; keys that the table does not know may be there.
        table: the kind of each key, which must be there.
        what: names the value in errors.
        optional: the same for keys that may be missing.

    Raises:
        ValueError: it does not fit; names the key and what is there.
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
