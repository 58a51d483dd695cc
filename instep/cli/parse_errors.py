"""jsonargparse's errors in one message: the key, the value, what is allowed, and what to do."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches

from instep.errors import SettingError

EXIT_USAGE = 2
_KEY = re.compile(r'Parser key "([^"]+)"')
_NESTED = re.compile(r"Given value: NestedArg\(key='([^']*)', val='?(.*?)'?\)\s*$", re.DOTALL)
_VALUE = re.compile(r"(?:Given|Got) value: (.*)\Z", re.DOTALL)
_NAME = re.compile(r"Expected a dot import path string: (\S+)")
_CLASS = re.compile(r"Problem with given class_path '([^']+)':\n((?:\s{6,}.*\n?)+)")
_EXPECTED = re.compile(r"Expected an? (?:<class '([^']+)'>|(.+?))(?:\. Got value|\n|$)")
_SUBCLASS = re.compile(r"does not correspond to a subclass of (\w+)")
_NO_OPTION = re.compile(r"unrecognized arguments: --([\w.]+)|does not accept option '([\w.]+)'")
_GROUP = re.compile(r"Group '(\w+)' does not")
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_KINDS = {"NoneType": "null", "str": "text", "int": "an integer", "float": "a number", "bool": "true or false"}
_LONG = 200


def explain(message: str, classes: Iterable[str] = (), known: Iterable[str] = ()) -> str:
    """Explain an error of jsonargparse; its text where its form is not known.

    Args:
        message: its text.
        classes: what may be named without a package.
        known: the settings' names, such as data.batch_size.
    """
    key = _KEY.search(message)
    if key is None:
        return _without_key(message.strip(), known)
    path, nested = key[1], _NESTED.search(message)
    names = _NAME.findall(message)
    if names and nested is None:
        return f"{path}={names[0]}: {_unknown_class(names[0], classes)}"
    problems = [(cls, text) for cls, text in _CLASS.findall(message) if cls != "instep.Callback"]
    if problems:
        return "; ".join(_of_class(path, cls, text, nested[2] if nested else "") for cls, text in problems)
    found = _VALUE.search(message)
    value = found[1].strip() if found else ""
    value = f"={value if len(value) <= _LONG else f'{value[:_LONG]} ...'}" if value else ""
    return f"{path}{value}: {_expected(message) or _joined(message.partition(':')[2])}"


def _without_key(message: str, known: Iterable[str]) -> str:
    missing = _REQUIRED.fullmatch(message)
    if missing is not None:
        name = missing[1].split(".")[-1]
        pkg = f"--{name} package.Class" if name in ("model", "data") else f"--{name}"
        return f"{name} is needed: give {pkg}, or {name}: in a --config file"
    unknown = _NO_OPTION.search(message)
    if unknown is None:
        return message
    group = _GROUP.search(message)
    path = f"{group[1]}.{unknown[2]}" if group else unknown[1] or unknown[2]
    first, _, name = path.partition(".")
    if first == "trainer" and name:
        from instep.trainer.settings import reject_unknown  # late: loads torch

        try:
            reject_unknown({name.split(".")[0]: None})
        except SettingError as error:
            return f"{path}: {error}"
    firsts = {it.partition(".")[0] for it in known}
    return f"{path}: there is no such setting.{_hint(path, known) if first in firsts else _hint(first, firsts)}"


def _of_class(path: str, cls: str, text: str, value: str) -> str:
    """Explain what is wrong with one argument of a class."""
    option = re.search(r"Option '([^']+)' is not accepted", text)
    if option is not None:
        takes = _arguments(cls)
        has = f" It takes {', '.join(takes)}." if takes else ""
        return f"{path}.{option[1]}: {cls} has no such argument.{_hint(option[1], takes)}{has}"
    required = _REQUIRED.search(text)
    if required is not None:
        return f"{path}: {cls} needs {required[1]}; give --{path}.{required[1].split(',')[0]}, or it in init_args:"
    inner = _KEY.search(text)
    if inner is not None:
        got = re.search(r"Got value: (.*)", text)
        value = value or (got[1].strip() if got else "")
        return f"{path}.{inner[1]}={value}: {_expected(text) or _joined(text)}, for {cls}"
    return f"{path}: {cls}: {_joined(text)}"


def _expected(message: str) -> str:
    """Say what a value may be."""
    kinds = dict.fromkeys(f"a subclass of {name}" for name in _SUBCLASS.findall(message))
    kinds |= dict.fromkeys(_kind(name or other) for name, other in _EXPECTED.findall(message))
    kinds = [kind for kind in kinds if not kind.startswith("path but")]
    return f"expected {' or '.join(kinds)}" if kinds else ""


def _kind(name: str) -> str:
    choices = re.search(r"Literal\[(.*)\]", name)
    return f"one of {choices[1]}" if choices else _KINDS.get(name, name.strip())


def _joined(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _arguments(path: str) -> list[str]:
    """The names of the arguments of a class that is imported; those of its bases too where it passes on the rest."""
    module, _, name = path.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    names: dict[str, None] = {}
    for base in cls.__mro__ if isinstance(cls, type) else ():
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= dict.fromkeys(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    names.pop("self", None)
    return list(names)


def _unknown_class(name: str, classes: Iterable[str]) -> str:
    return (
        f"there is no class of this name.{_hint(name, classes)} Give its full path, as package.module.Class; the name "
        "alone is enough for instep's callbacks, loggers and strategies, torch's optimizers and schedulers, and "
        "classes that the program has imported."
    )


def _hint(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
