"""Place and writing of the config file, and its defaults on this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from instep.config.layers import FILE_VARIABLE, NO_FILE, default_file, put, read_file
from instep.config.porting import advice
from instep.config.settings import DICTS, NAMES, check, choices
from instep.errors import SettingError, UsageError
from instep.state import DEVICE_KINDS, find_device_kind
from instep.utils.atomic import replacing

CONFIG_HELP = "the file (default: INSTEP_CONFIG_FILE, else ~/.config/instep/config.yaml)"


def add_config(parser: argparse.ArgumentParser) -> None:
    """The option `--config` of a command that writes the file."""
    parser.add_argument("--config", metavar="FILE", help=CONFIG_HELP)


def target(config: str | None) -> Path:
    """The file that a command writes."""
    config = config or os.environ.get(FILE_VARIABLE, "").strip()
    if config == NO_FILE:
        raise UsageError(f"{NO_FILE!r} means no config file: name one by --config FILE")
    return Path(os.path.expanduser(config)) if config else default_file()  # no error where there is no home


def use(path: Path) -> str:
    """How a launch takes a file up."""
    return (
        "`instep launch SCRIPT` uses it"
        if path == default_file()
        else f"`instep launch --config {path} SCRIPT` uses it"
    )


def assignments(words: Iterable[str]) -> dict[str, Any]:
    """Settings as `NAME=VALUE` words, checked; `NAME.MEMBER=VALUE` for a member of one that is a mapping.

    Raises:
        SettingError: a word is none, or its value is wrong.

    Example:
        >>> assignments(["env.A=1", "env=B=2", "max_restarts=3"])
        {'env': {'A': '1', 'B': '2'}, 'max_restarts': 3}
    """
    values: dict[str, Any] = {}
    for word in words:
        path, sign, value = word.partition("=")
        name, member = split(path)
        if not sign:
            raise SettingError(f"{word!r}: expected NAME=VALUE", field="setting", got=word)
        given = value if not member else {member: value} if "," in value else f"{member}={value}"
        checked = check({name: given}, {})[name]
        values[name] = {**values.get(name, {}), **checked} if name in DICTS else checked
    return values


def split(path: str) -> tuple[str, str]:
    """A setting's name, and that of its member or nothing.

    Raises:
        SettingError: there is none of this name, or it has no members.
    """
    name, _, member = path.partition(".")
    name = name.replace("-", "_")
    if name not in NAMES or (member and name not in DICTS):
        problem = f"{name} has no members; {', '.join(DICTS)} have" if name in NAMES else advice(name)
        raise SettingError(f"{path!r}: {problem}", field="setting", got=path)
    return name, member


def laid_over(values: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others laid over them, as a launch lays its sources over one another."""
    merged = dict(values)
    put(new, dict.fromkeys(new, "here"), merged, dict.fromkeys(merged, "there"))
    return merged


def complete_setting(prefix: str, **_: Any) -> list[str]:
    """What a shell offers for NAME=VALUE."""
    name, sign = prefix.partition("=")[:2]
    return [f"{name}={value}" for value in choices(name)] if sign else [f"{name}=" for name in NAMES]


def read_settings(path: Path) -> dict[str, Any]:
    """What a config file says, checked.

    Raises:
        SettingError: as `read_file` and `check` do.
    """
    said = read_file(path)
    return check({name: value for name, (value, _) in said.items()}, {name: where for name, (_, where) in said.items()})


def write_file(path: Path, values: Mapping[str, Any]) -> None:
    """Write a config file: whole, or not at all."""
    import yaml  # late: loads a C library

    ordered = {name: values[name] for name in NAMES if name in values}
    head = "# Settings of `instep launch`. `instep config show` explains them, `instep config update` changes them.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True) if ordered else ""
    with replacing(path) as part:
        part.write_text(head + text, encoding="utf-8")


def found() -> dict[str, Any]:
    """The kind and number of this machine's devices; one process on a CPU."""
    kind = find_device_kind("auto")
    return {"accelerator": kind.name, "devices": 1 if kind.name == "cpu" else kind.count()}


def kinds() -> list[str]:
    """The kinds of device that are here, the best first."""
    return [name for name, kind in DEVICE_KINDS.items() if kind.count()]
