"""Convert hyperparameters of any type to JSON values, nested or flat, and write them to a YAML file."""

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

_MAX_ITEMS = 64  # a tensor or array with more than 64 elements is described by its shape and dtype


def plain(value: Any) -> Any:
    """Convert a value of any type to JSON values.

    Mappings, namespaces, dataclasses, pydantic models and OmegaConf's containers become dicts. Lists, tuples, sets, and
    small tensors and arrays become lists. Classes and functions become their dotted name, and a `functools.partial` the
    name of its function and its arguments. Any other object becomes `str(value)`.
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
    """Convert parameters to a dict of one level: nested keys are joined by `separator`, lists become JSON text."""
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
    """Add hyperparameters to a YAML file, which is replaced atomically."""
    import yaml  # imported late: only needed for hyperparameters

    values = {**_read(path), **plain(params)}
    with replacing(path, sync=False) as part:
        part.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")


def ensure_file(path: Path) -> None:
    """Write an empty `hparams.yaml` if there is none, since programs that read Lightning's folders expect the file."""
    if not path.exists():
        merge_file(path, {})


def _read(path: Path) -> dict[str, Any]:
    if not path.exists() or path.is_symlink():  # do not follow a link, which may lead to any file
        return {}
    values: Any = None
    with suppress(SettingError):  # a file that cannot be read is replaced
        values = plain_yaml.load(plain_yaml.read_text(path), path)
    return values if isinstance(values, dict) else {}
