"""Check values that are read from files, and convert errors that a file's content causes to checkpoint errors.

`check` compares the values of a file with a table of checks, before the values are used.
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
    """Convert errors of the `with` block to checkpoint errors.

    Use it around code that reads values from a file without checking them, where a wrong value may cause any error. The
    original error is the cause of the new one.

    Args:
        path: the file or folder that is read.
        what: what is wrong, for the message, such as "is not a whole file of torch.save".

    Raises:
        CheckpointError: the file cannot be read, or needs more memory than there is.
        CorruptCheckpointError: any other error was raised, except errors of instep, which are not changed.
    """
    try:
        yield
    # BrokenPipeError: a program that reads this program's output, such as `head`, has closed the pipe.
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
    """Convert errors of an object's `load_state_dict` to checkpoint errors.

    Args:
        path: path of the checkpoint.
        what: name of the object that loads its state, for the message.

    Raises:
        CorruptCheckpointError: the object raised an error that a wrong state may cause. Errors of instep and of the
            system stay as they are. With several ranks, so does a RuntimeError, since it may mean that another rank has
            ended.
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


# The following functions check the type of a value. Their names appear in error messages: "a <name> is expected".


def count(value: Any) -> bool:
    """Return True if a value is an integer of at least 0 that fits into 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def text(value: Any) -> bool:
    """Return True if a value is a string."""
    return isinstance(value, str)


def flag(value: Any) -> bool:
    """Return True if a value is a bool."""
    return isinstance(value, bool)


def number(value: Any) -> bool:
    """Return True if a value is a number that fits into a float, including nan and infinity."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**1000)


def finite(value: Any) -> bool:
    """Return True if a value is a number that is neither nan nor infinite."""
    return number(value) and math.isfinite(value)


def mapping(value: Any) -> bool:
    """Return True if a value is a dict."""
    return isinstance(value, dict)


def named(value: Any) -> bool:
    """Return True if a value is a dict whose keys are strings."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def anything(_: Any) -> bool:
    """Return True for any value."""
    return True


def none_or(kind: Kind) -> Kind:
    """Make a check that accepts None and the values that the check `kind` accepts."""
    return _called(f"None or {kind.__name__}", lambda value: value is None or kind(value))


def list_of(kind: Kind) -> Kind:
    """Make a check that accepts lists and tuples whose items the check `kind` accepts."""
    return _called(f"list of {kind.__name__}", lambda value: isinstance(value, list | tuple) and all(map(kind, value)))


def dict_of(kind: Kind) -> Kind:
    """Make a check that accepts dicts with strings as keys whose values the check `kind` accepts."""
    return _called(f"dict of {kind.__name__}", lambda value: named(value) and all(map(kind, value.values())))


def check(value: Any, table: Mapping[str, Kind], what: str, optional: Mapping[str, Kind] | None = None) -> None:
    """Check the values of a dict.

    Args:
        value: dict to check; it may have keys that are not in the table.
        table: check for the value of each required key.
        what: name of the dict, for the message.
        optional: check for the value of each key that may be missing.

    Raises:
        ValueError: `value` is not a dict, or a key is missing or has a wrong value; the message names the key and the
            value.
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
