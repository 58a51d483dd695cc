"""Saved settings against those of the object that takes them up: torch takes anything, and fails in a later step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_FLOAT_BITS = 1024  # a larger integer overflows where it is multiplied with a float


def check_alike(own: Mapping[str, Any], saved: Mapping[str, Any], owner: type) -> None:
    """Refuse saved settings of other kinds than an object's own.

    Args:
        own: what the object has now.
        saved: what it is to have; may have more, and may lack some.
        owner: the object's class, none of whose methods a setting may take the place of.

    Raises:
        TypeError: one is of another kind; names it.
    """
    for key, value in saved.items():
        taken = inspect.getattr_static(owner, str(key), None)
        if not isinstance(key, str) or callable(taken) or isinstance(taken, property | staticmethod | classmethod):
            raise TypeError(f"{key!r} is no setting of {owner.__name__}")
        if key in own and not _alike(own[key], value):
            raise TypeError(f"{key} is {str(value)[:80]!r}, where a {type(own[key]).__name__} is expected")


def _alike(own: Any, saved: Any) -> bool:
    if own is None or saved is None:
        return True
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool | int) and isinstance(saved, bool | int)
    if isinstance(own, int | float | Tensor):
        if isinstance(saved, int):
            return saved.bit_length() < _FLOAT_BITS
        return isinstance(saved, float) or (isinstance(saved, Tensor) and saved.numel() == 1)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and all(any(_alike(one, it) for one in own) for it in saved if own)
    if isinstance(own, dict):
        return isinstance(saved, dict)
    return isinstance(saved, type(own))
