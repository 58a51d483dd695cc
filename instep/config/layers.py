"""Where the settings of a launch come from: command line, then config file, then environment, then the default.

A setting that a higher source names hides those below, but the members of `env` and `rdzv_conf`, and the options of one
and the same strategy, are taken from all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.config.porting import advice
from instep.config.settings import DICTS, NAMES, LaunchSettings, check
from instep.errors import SettingError, one_of
from instep.utils.env import variable_of
from instep.utils.plain_yaml import compose, read_text

TEMPLATES = Path(__file__).parent.parent / "configs"
FILE_VARIABLE = "INSTEP_CONFIG_FILE"
NO_FILE = "none"
_OF_FIT = {"model", "data", "trainer", "ckpt_path", "seed_everything"}
_FEW = 8  # problems of a kind that are told one by one
_ALSO = {"node_rank": "NODE_RANK", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}  # torchrun's

Layer = Mapping[str, tuple[Any, str]]
"""What one source says: setting -> value and where exactly it stands."""


@dataclass(frozen=True)
class Launch:
    """The settings of a launch, and where each comes from.

    Args:
        settings: the values that hold.
        sources: setting -> where it was said; settings that nobody named are not in it.
        file: the config file; None where there is none.
    """

    settings: LaunchSettings
    sources: Mapping[str, str]
    file: Path | None = None

    def given(self) -> dict[str, Any]:
        """The settings that somebody named."""
        return {name: getattr(self.settings, name) for name in NAMES if name in self.sources}

    def check(self) -> None:
        """Raise a `SettingError` where options are given, and no strategy whose they are."""
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
    """The settings that hold.

    Args:
        command_line: what it says, by setting, with the word that says it.
        config: a config file, the name of one that comes with instep (`templates()`), or "none" for no file at all; by
            default what INSTEP_CONFIG_FILE says, else `default_file()` where that exists.
        environ: the variables; `os.environ` by default.

    Raises:
        SettingError: a value is wrong, wherever it stands; the text says where.
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
    """Lay what a source says over what lower ones say.

    Args:
        layer: checked values.
        where: the place of each.
        values: of the lower ones; changed.
        sources: their places; changed.

    Raises:
        SettingError: the source names both counts of processes.
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
        gone.append("strategy_options")  # those of another strategy
    for name in gone:
        values.pop(name, None)
        sources.pop(name, None)
    for name, value in layer.items():
        joined = name in DICTS and name in values
        values[name] = {**values[name], **value} if joined else value
        sources[name] = f"{where[name]}; {sources[name]}" if joined else where[name]


def default_file(environ: Mapping[str, str] | None = None) -> Path:
    """Where the config file lies unless something else is said: `$XDG_CONFIG_HOME/instep/config.yaml`."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "instep" / "config.yaml"


def templates() -> dict[str, str]:
    """The config files that come with instep: name -> what it is for."""
    files = sorted(TEMPLATES.glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ") for file in files}


def find_file(config: str | None, environ: Mapping[str, str] | None = None) -> Path | None:
    """The config file that holds, as `resolve` describes it; None for no file.

    Raises:
        SettingError: the file that was asked for is not there.
    """
    environ = os.environ if environ is None else environ
    config = environ.get(FILE_VARIABLE, "").strip() or None if config is None else config
    if config == NO_FILE:
        return None
    if config is None:
        return default_file(environ) if default_file(environ).is_file() else None
    path = Path(os.path.expanduser(config))  # Path's own raises where there is no home
    if path.is_file():
        return path
    template = TEMPLATES / f"{config}.yaml"
    if template.is_file():
        return template
    if path.name != config or path.suffix:
        raise SettingError(
            f"there is no config file {path}; `instep config default --config {path}` writes one", field="config"
        )
    raise SettingError(
        f"{one_of('config', config, (NO_FILE, *templates()))} Or give the path of a file.", field="config"
    )


def read_file(path: Path, check_names: bool = True) -> dict[str, tuple[Any, str]]:
    """What a config file says, with the line of each setting.

    Args:
        path: a YAML file of settings.
        check_names: refuse names that are no settings.

    Raises:
        SettingError: it is no YAML, no mapping, or has unknown or repeated names; then wrong values are told as well.
    """
    node, values = compose(read_text(path), path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingError(f"{path}: expected settings, one `name: value` on each line, got {values!r}", field="config")
    if check_names and any(key.value in _OF_FIT for key, _ in node.value):
        raise SettingError(f"{path} is a configuration of `instep fit`: instep fit --config {path}", field="config")
    said: dict[str, tuple[Any, str]] = {}
    problems = repeated_keys(node, path)
    unknown = 0
    for key, _ in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = str(key.value)
        if check_names and name not in NAMES:
            unknown += 1
            if unknown <= _FEW:  # a near name takes a millisecond to find
                problems.append(f"{where}: {advice(name)}")
        if values.get(key.value) is not None:  # `name:` alone leaves it open
            said[name] = values[key.value], where
    if unknown > _FEW:
        problems.append(f"{path}: and {unknown - _FEW:,} more names that are no settings")
    if problems:
        known = {name: it for name, it in said.items() if name in NAMES}
        try:
            check({name: it[0] for name, it in known.items()}, {name: it[1] for name, it in known.items()})
        except SettingError as error:
            problems.append(str(error))
        raise SettingError("\n".join(problems), field="config")
    return said


def repeated_keys(root: Any, path: object) -> list[str]:
    """What to say of keys that stand twice in a mapping of YAML, at any depth, of which the last would hold.

    Args:
        root: what `yaml.compose` returns.
        path: of the file.
    """
    said: list[str] = []
    nodes = [] if root is None else [("", root)]
    seen: set[int] = set()  # an alias is a node that was there before
    for above, node in nodes:  # grows
        if id(node) in seen or len(said) >= _FEW:
            continue
        seen.add(id(node))
        if node.id == "sequence":
            nodes += [(above, inner) for inner in node.value]
        lines: dict[tuple[str, str], int] = {}
        for key, inner in node.value if node.id == "mapping" else ():
            name, line, known = f"{above}{key.value}", key.start_mark.line + 1, (key.tag, str(key.value))
            if known in lines and key.tag != "tag:yaml.org,2002:merge":  # `<<:` may stand there often
                said.append(f"{path}:{line}: {name} stands there twice (also in line {lines[known]})")
            lines[known] = line
            nodes.append((f"{name}.", inner))
    return said


def _environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    said: dict[str, tuple[Any, str]] = {}
    for name in NAMES:
        variable = next((key for key in (variable_of(name), _ALSO.get(name, "")) if environ.get(key, "").strip()), None)
        if variable is not None:
            said[name] = environ[variable].strip(), f"environment {variable}"
    return said
