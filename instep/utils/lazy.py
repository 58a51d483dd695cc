"""Packages whose names are loaded when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loads(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module's `__getattr__` that imports a name from its file, once, and its `__dir__`.

    Args:
        package: the package's `__name__`.
        home: name -> file, without ending.

    Example:
        In a package's `__init__.py`::

            __getattr__, __dir__ = loads(__name__, {"Timer": "timer"})
    """

    def load(name: str) -> Any:
        if name not in home:
            there = ", ".join(sys.modules[package].__all__)
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {there}")
        value = getattr(import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(sys.modules[package].__all__)
