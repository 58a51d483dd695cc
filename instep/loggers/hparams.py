"""Hyperparameters of any kind as JSON values: nested for a file, flat for a table."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from instep.errors import SettingError
from instep.utils import plain_yaml
from instep.utils.atomic import replacing
from instep.utils.hparams import as_container, plain_values
from instep.utils.named import is_code
from instep.utils.warn import warn_user

NAME = "hparams.yaml"

_MAX_ITEMS = 64  # a larger tensor or array is data, not a setting


def plain(value: Any) -> Any:
    """Convert a value to what JSON can hold.

    Mappings, namespaces, dataclasses, pydantic models and OmegaConf's containers become dicts; sequences and sets
    become lists, and small tensors and arrays their values. Classes and functions become their dotted name, and a
    partial its function's name and its arguments. Anything else becomes its text.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, functools.partial) or is_code(value):
        value = plain_values(value)
    value = as_container(value)
    if isinstance(value, Mapping):
        return {str(plain_values(key) if is_code(key) else key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value, key=repr)]
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        if math.prod(value.shape) <= _MAX_ITEMS:
            return plain(value.tolist())
        return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
    return str(value)


def flatten(params: Mapping[str, Any], separator: str = "/") -> dict[str, bool | int | float | str]:
    """Return `plain` parameters in one level: nested keys joined by `separator`, lists as text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in plain(params).items():
        if isinstance(value, dict) and value:
            new = {f"{key}{separator}{name}": item for name, item in flatten(value, separator).items()}
        else:
            new = {key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)}
        for name in flat.keys() & new.keys():
            warn_user(f"two hyperparameters are called {name!r} in one level; the last one is logged. Rename one.")
        flat |= new
    return flat


def merge_file(path: Path, params: Mapping[str, Any]) -> None:
    """Add hyperparameters to a YAML file of plain values; readers always see a whole file."""
    import yaml  # imported late: not every run has hyperparameters

    values = {**_read(path), **plain(params)}
    with replacing(path, sync=False) as part:
        part.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def ensure_file(path: Path) -> None:
    """Write a file without hyperparameters if there is none, since readers of Lightning's folders expect one."""
    if not path.exists():
        merge_file(path, {})


def _read(path: Path) -> dict[str, Any]:
    if not path.exists() or path.is_symlink():  # a stranger's link would bring in the file to which it leads
        return {}
    values: Any = None
    with suppress(SettingError):  # the folder may be another program's; a file that instep cannot read is replaced
        values = plain_yaml.load(plain_yaml.read_text(path), path)
    return values if isinstance(values, dict) else {}
