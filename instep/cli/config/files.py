"""What the `instep config` commands share: where the file lies, how it is written, how settings are shown."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from instep.errors import SettingError, UsageError
from instep.launch.elsewhere import advice
from instep.launch.settings import NAMES, check
from instep.launch.sources import FILE_VARIABLE, NO_FILE, default_file

CONFIG_HELP = "the file (default: INSTEP_CONFIG_FILE, else ~/.config/instep/config.yaml)"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


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
    """Settings as `NAME=VALUE` words, checked.

    Raises:
        SettingError: a word is none, or its value is wrong.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        name = name.replace("-", "_")
        if not sign or name not in NAMES:
            raise SettingError(
                f"{word!r}: {advice(name) if sign else 'expected NAME=VALUE'}", field="setting", got=word
            )
        values[name] = value
    return check(values, {})


def write_file(path: Path, values: Mapping[str, Any]) -> None:
    """Write a config file: whole, or not at all."""
    import yaml  # late: loads a C library

    ordered = {name: values[name] for name in NAMES if name in values}
    head = "# Settings of `instep launch`. `instep config show` explains them, `instep config update` changes them.\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(head + (yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True) if ordered else ""))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def shown(value: Any) -> Any:
    """A setting's value without secrets: what people copy into reports."""
    if isinstance(value, Mapping):
        return {name: "(hidden)" if _SECRET.search(name) else shown(inner) for name, inner in value.items()}
    return value
