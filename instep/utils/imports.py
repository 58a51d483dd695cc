"""Imports on use: optional packages, with an error that gives the `pip install`, and the names of a package's face."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from instep.errors import MissingPackageError


def require(module: str, *, extra: str | None, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: the dotted module name.
        extra: instep's extra that installs it, or None for a package that is always installed with instep.
        purpose: what needs it, for the error's text.

    Returns:
        The imported module.

    Raises:
        MissingPackageError: it is not installed.

    Example:
        >>> ray = require("ray", extra="ray", purpose="RayLauncher")  # doctest: +SKIP
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        install = f"pip install 'instep[{extra}]'" if extra else f"pip install {module.split('.')[0]}"
        raise MissingPackageError(f"{purpose} needs the package {module!r}. Install it with: {install}") from error


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
