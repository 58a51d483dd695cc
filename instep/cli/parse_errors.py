"""jsonargparse's errors in one message: the key, the value, what is allowed, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from types import ModuleType

from instep.errors import SettingError

EXIT_USAGE = 2
_KEY = re.compile(r'(?:Parser key|Key) "([^"]+)"')
_NESTED = re.compile(r"Given value: NestedArg\(key='([^']*)', val=(.*)\)\s*$", re.DOTALL)
_VALUE = re.compile(r"Given value: (.*)\Z", re.DOTALL)
_NAME = re.compile(r"Expected a dot import path string: (\S+)")
_CLASS = re.compile(r"Problem with given class_path '([^']+)':\n((?:\s{6,}.*\n?)+)")
_UNKNOWN = re.compile(r"--(trainer)\.(\w+)|Group '(trainer)' does not accept option '(\w+)'")
_LONG = 200


def explain(message: str, rooms: Iterable[ModuleType]) -> str:
    """An error of jsonargparse as people read it; as it is where its form is not known.

    Args:
        message: its text.
        rooms: the packages whose classes may be named without a package.
    """
    unknown = [a or b for _, a, _, b in _UNKNOWN.findall(message)] if "Parser key" not in message else []
    if unknown:
        return _unknown_settings(unknown) or message
    key = _KEY.search(message)
    if key is None:
        return message.strip()
    path, value = key[1], _given(message)
    nested = _NESTED.search(message)
    if nested is not None:
        path, value = f"{path}.{nested[1]}", nested[2]
    names = _NAME.findall(message)
    if names and nested is None:
        return f"{path}={value or names[0]}: {_unknown_class(names[0], rooms)}"
    problems = _problems(message)
    if not problems:
        return message.strip()
    return f"{path}={value}: {'; '.join(problems)}" if value else f"{path}: {'; '.join(problems)}"


def _given(message: str) -> str:
    found = _VALUE.search(message) or re.search(r"Got value: (.*)", message)
    value = found[1].strip() if found else ""
    return value if len(value) <= _LONG else f"{value[:_LONG]} ..."


def _problems(message: str) -> list[str]:
    """What was expected of each of the types that the value may have."""
    classes = [(path, text) for path, text in _CLASS.findall(message) if path != "instep.Callback"]
    if classes:
        return [f"{path}: {_plain(text)}" for path, text in classes]
    kinds = re.findall(r"Expected an? (?:<class '([^']+)'>|(.+?))(?:\. Got value|\n|$)", message)
    kinds = list(dict.fromkeys(_kind(name or other) for name, other in kinds))
    return [f"expected {' or '.join(kinds)}"] if kinds else [_plain(message.partition(":")[2])]


def _kind(name: str) -> str:
    return {"NoneType": "null", "str": "text", "int": "an integer", "float": "a number", "bool": "true or false"}.get(
        name, name.strip()
    )


def _plain(text: str) -> str:
    text = re.sub(r"Parser key \"([^\"]+)\":\s*", r"\1: ", text)
    text = re.sub(r"Expected an? <class '([^']+)'>", lambda found: f"expected {_kind(found[1])}", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)


def _unknown_settings(names: list[str]) -> str | None:
    from instep.trainer.settings import reject_unknown  # late: loads torch

    try:
        reject_unknown(dict.fromkeys(names))
    except SettingError as error:
        return str(error)
    return None


def _unknown_class(name: str, rooms: Iterable[ModuleType]) -> str:
    known = sorted({each for room in rooms for each in room.__all__ if each[0].isupper()})
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"there is no class of this name.{hint} Give its full path, as package.module.Class; the name alone is enough "
        "for instep's callbacks, loggers and strategies, torch's optimizers and schedulers, and classes that your "
        "program has imported."
    )
