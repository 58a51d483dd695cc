"""Combine the sources of launch settings: command line, then config file, then environment, then the default.

If several sources have a setting, the first of them counts. Exceptions are `env`, `rdzv_conf` and the options of one
strategy: their members are merged from all sources.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.config.file import find_file, read_file
from instep.config.settings import DICTS, NAMES, LaunchSettings, check
from instep.errors import SettingError
from instep.utils.env import variable_of

# Variables of torchrun that also set these settings.
_ALSO = {"node_rank": "NODE_RANK", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}

Layer = Mapping[str, tuple[Any, str]]
"""Settings from one source: name -> its value, and the exact place where the source sets it."""


@dataclass(frozen=True)
class Launch:
    """The settings of a launch, and the source of each setting.

    Args:
        settings: the settings with their final values.
        sources: source of each setting; a setting that no source has set is not in it.
        file: path of the config file; None if none is used.
    """

    settings: LaunchSettings
    sources: Mapping[str, str]
    file: Path | None = None

    def given(self) -> dict[str, Any]:
        """Return the settings that the command line, a file or a variable has set; the others have their defaults."""
        return {name: getattr(self.settings, name) for name in NAMES if name in self.sources}

    def check(self) -> None:
        """Raise a `SettingError` if strategy options are given without a strategy."""
        if "strategy_options" in self.sources and self.settings.strategy == "auto":
            raise SettingError(
                f"strategy_options ({self.sources['strategy_options']}) are arguments of a strategy, and none is "
                "chosen: give strategy too",
                field="strategy_options",
                got=self.settings.strategy_options,
            )


def resolve(
    command_line: Layer | None = None, config: str | None = None, environ: Mapping[str, str] | None = None
) -> Launch:
    """Resolve the settings from all sources.

    Args:
        command_line: value of each setting on the command line, with the option that gave it.
        config: path of a config file, the name of one that comes with instep (`templates()`), or "none" for no file.
            None: the file that INSTEP_CONFIG_FILE names, else `default_file()` if it exists.
        environ: environment variables; None: `os.environ`.

    Raises:
        SettingError: a value is wrong; the message names its source.
    """
    environ = os.environ if environ is None else environ
    file = find_file(config, environ)
    said = [_environment(environ), {} if file is None else read_file(file), command_line or {}]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in said:
        source = {name: where for name, (_, where) in layer.items()}
        checked = check({name: value for name, (value, _) in layer.items()}, source)
        put(checked, source, values, sources)
    return Launch(LaunchSettings(**values), {name: sources[name] for name in NAMES if name in sources}, file)


def put(layer: Mapping[str, Any], where: Mapping[str, str], values: dict[str, Any], sources: dict[str, str]) -> None:
    """Merge the settings of a source over the settings of sources that count less.

    Args:
        layer: checked values of the source.
        where: place of each value, such as a line of the config file.
        values: values from the sources that count less; changed in place.
        sources: places of these values; changed in place.

    Raises:
        SettingError: the source has both `devices` and `num_processes`.
    """
    if "devices" in layer and "num_processes" in layer:
        raise SettingError(
            f"devices ({where['devices']}) counts the processes of a machine and num_processes "
            f"({where['num_processes']}) all: give one of them",
            field="num_processes",
        )
    hidden = {"devices": "num_processes", "num_processes": "devices"}
    gone = [hidden[name] for name in layer if name in hidden]
    if "strategy" in layer and layer["strategy"] != values.get("strategy"):
        gone.append("strategy_options")  # the options in `values` are dropped, since they belong to another strategy
    for name in gone:
        values.pop(name, None)
        sources.pop(name, None)
    for name, value in layer.items():
        joined = name in DICTS and name in values
        values[name] = {**values[name], **value} if joined else value
        sources[name] = f"{where[name]}; {sources[name]}" if joined else where[name]


def _environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    said: dict[str, tuple[Any, str]] = {}
    for name in NAMES:
        variable = next((key for key in (variable_of(name), _ALSO.get(name, "")) if environ.get(key, "").strip()), None)
        if variable is not None:
            said[name] = environ[variable].strip(), f"environment {variable}"
    return said
