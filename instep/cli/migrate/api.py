"""What instep's classes take and have: asked of the classes, so that no list of it grows old."""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from typing import Any

from instep.errors import InstepError


@cache
def load(name: str) -> Any:
    """What a dotted name stands for."""
    module, _, leaf = name.rpartition(".")
    return getattr(import_module(module), leaf)


@cache
def attributes(owner: type) -> frozenset[str]:
    """The names that objects of a class have: its own, those that methods give to `self`, a Trainer's arguments."""
    names = set(dir(owner))
    for base in owner.__mro__:
        if base.__module__.startswith("instep."):
            names |= set(re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=[^=]", inspect.getsource(base)))
    if owner.__name__ == "Trainer":
        names |= set(inspect.signature(owner).parameters)
    return frozenset(names)


def has_argument(function: Any, argument: str) -> bool:
    """Whether a function or class has an argument of this name."""
    found = inspect.signature(function).parameters.get(argument)
    return found is not None and found.kind is not found.VAR_KEYWORD


def count_positional(function: Any) -> float:
    """How many arguments a function or class takes without a name; infinity for `*args`."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return float("inf")
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def refused(function: Any, argument: str) -> str | None:
    """Why a function or class does not take an argument; None where it does.

    Example:
        >>> import shutil
        >>> refused(shutil.which, "folder")
        'it takes cmd, mode, path'
    """
    if has_argument(function, argument):
        return None
    parameters = inspect.signature(function).parameters
    others = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    if others is None:
        return f"it takes {', '.join(name for name in parameters if name != 'self') or 'no arguments'}"
    if others != "unknown":  # what it takes beside its own goes to somebody else
        return None
    try:
        function(**{argument: None})  # our classes refuse it before anything else, and say what to do
    except InstepError as error:
        return str(error).partition(f" {argument}: ")[2] or str(error)
    return None


def wrong_value(argument: str, value: Any) -> str | None:
    """Why the Trainer refuses a value on any machine; None where it does not."""
    from instep.trainer.settings import check_value

    try:
        check_value(argument, value)
    except InstepError as error:
        return str(error)
    return None
