"""Find, read and write the config file of `instep launch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.config.settings import NAMES, advice, check
from instep.errors import SettingError, one_of
from instep.utils.atomic import replacing
from instep.utils.plain_yaml import compose, read_text

TEMPLATES = Path(__file__).parent.parent / "configs"
FILE_VARIABLE = "INSTEP_CONFIG_FILE"
NO_FILE = "none"
_OF_FIT = {"model", "data", "trainer", "ckpt_path", "seed_everything"}
_OF_ACCELERATE = {"compute_environment", "distributed_type"}
_FEW = 8  # maximum number of problems of one kind that are listed one by one
_HEAD = "# Settings of `instep launch`. `instep config show` explains them, `instep config update` changes them.\n"


def default_file(environ: Mapping[str, str] | None = None) -> Path:
    """Return the default path of the config file: `$XDG_CONFIG_HOME/instep/config.yaml`."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "instep" / "config.yaml"


def templates() -> dict[str, str]:
    """Return the config files that come with instep: name -> purpose."""
    files = sorted(TEMPLATES.glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ") for file in files}


def find_file(config: str | None, environ: Mapping[str, str] | None = None) -> Path | None:
    """Find the config file to use, in the order that `resolve` describes; return None if no file is used.

    Raises:
        SettingError: the named file does not exist.
    """
    environ = os.environ if environ is None else environ
    config = environ.get(FILE_VARIABLE, "").strip() or None if config is None else config
    if config == NO_FILE:
        return None
    if config is None:
        return default_file(environ) if default_file(environ).is_file() else None
    path = Path(os.path.expanduser(config))  # Path.expanduser raises if there is no home folder
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
    """Read a config file, with the line of each setting.

    Args:
        path: a YAML file of settings.
        check_names: whether names that are not settings are refused.

    Raises:
        SettingError: the file is not YAML, not a mapping, or has unknown or repeated names. The message about names
            also lists wrong values.
    """
    node, values = compose(read_text(path), path)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingError(f"{path}: expected settings, one `name: value` on each line, got {values!r}", field="config")
    if check_names and any(key.value in _OF_FIT for key, _ in node.value):
        raise SettingError(f"{path} is a configuration of `instep fit`: instep fit --config {path}", field="config")
    if check_names and any(key.value in _OF_ACCELERATE for key, _ in node.value):
        raise SettingError(
            f"{path} is a configuration of Accelerate's: `instep config update --from {path}` takes it over",
            field="config",
        )
    said: dict[str, tuple[Any, str]] = {}
    problems = repeated_keys(node, path)
    unknown = 0
    for key, _ in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = str(key.value)
        if check_names and name not in NAMES:
            unknown += 1
            if unknown <= _FEW:  # only the first names get advice, since each takes a millisecond
                problems.append(f"{where}: {advice(name)}")
        if values.get(key.value) is not None:  # a setting without a value (`name:`) counts as not given
            said[name] = values[key.value], where
    if unknown > _FEW:
        problems.append(f"{path}: and {unknown - _FEW:,} more names that are no settings")
    if problems:
        known = {name: pair for name, pair in said.items() if name in NAMES}
        try:
            check(*({name: pair[part] for name, pair in known.items()} for part in (0, 1)))
        except SettingError as error:
            problems.append(str(error))
        raise SettingError("\n".join(problems), field="config")
    return said


def read_settings(path: Path) -> dict[str, Any]:
    """Read a config file, and check its values.

    Raises:
        SettingError: in the same cases as for `read_file` and `check`.
    """
    said = read_file(path)
    return check({name: value for name, (value, _) in said.items()}, {name: where for name, (_, where) in said.items()})


def write_file(path: Path, values: Mapping[str, Any]) -> None:
    """Write a config file in one step, so that a reader always sees a whole file."""
    import yaml  # imported late, since it loads a C library

    ordered = {name: values[name] for name in NAMES if name in values}
    path.parent.mkdir(parents=True, exist_ok=True)
    body = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True) if ordered else ""
    with replacing(path) as part:
        part.write_text(_HEAD + body, encoding="utf-8")


def repeated_keys(root: Any, path: object) -> list[str]:
    """Describe the keys that occur twice in a YAML mapping, at any depth, since YAML would silently use the last one.

    Args:
        root: node that `yaml.compose` returned.
        path: path of the file, for the descriptions.
    """
    said: list[str] = []
    nodes = [] if root is None else [("", root)]
    seen: set[int] = set()  # ids of visited nodes, since an alias refers to the same node again
    for above, node in nodes:  # the list of nodes grows during the loop
        if id(node) in seen or len(said) >= _FEW:
            continue
        seen.add(id(node))
        if node.id == "sequence":
            nodes += [(above, inner) for inner in node.value]
        lines: dict[tuple[str, str], int] = {}
        for key, inner in node.value if node.id == "mapping" else ():
            name, line, known = f"{above}{key.value}", key.start_mark.line + 1, (key.tag, str(key.value))
            # The merge key `<<:` may occur in a mapping more than once.
            if known in lines and key.tag != "tag:yaml.org,2002:merge":
                said.append(f"{path}:{line}: {name} stands there twice (also in line {lines[known]})")
            lines[known] = line
            nodes.append((f"{name}.", inner))
    return said
