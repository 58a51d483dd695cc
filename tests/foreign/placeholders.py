"""Placeholders for names of another package that instep does not have, and the modules that hold them.

A file of tests must load even where one of its names has no counterpart: only the tests that use the name may fail. So
while files load, a placeholder takes everything; once tests run, each use raises `NotInInstep`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


class NotInInstep(Exception):
    """A test used a name of another package that has no counterpart."""


class Missing(type):
    """The class of placeholders. Each is a class, so that it may stand as a base and in annotations."""

    loading = True  # while files load; the plug-in turns it off for the tests

    def __new__(mcs, name: str, bases: tuple[type, ...] = (), body: dict[str, Any] | None = None) -> Any:
        missing = [base.__name__ for base in bases if isinstance(base, Missing)]
        if missing and not Missing.loading:
            raise NotInInstep(missing[0])
        cell = {key: value for key, value in (body or {}).items() if key == "__classcell__"}
        return super().__new__(mcs, missing[0] if missing else name, (), cell)

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls.__name__)

    def _use(cls, name: str = "") -> Any:
        if not Missing.loading:
            raise NotInInstep(cls.__name__)
        return Missing(f"{cls.__name__}.{name}" if name else cls.__name__)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls._use()
        decorates = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Missing)
        return args[0] if decorates else made

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._use(name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return bool(cls._use()) and False

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return bool(cls._use()) and False

    def __iter__(cls) -> Any:
        return iter([cls._use()])

    def __getitem__(cls, index: Any) -> Any:
        return cls._use()

    def __or__(cls, other: Any) -> Any:  # an annotation
        return cls


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of another package: each name of theirs is looked up when it is used.

    Args:
        roots: source folder of each package, by its import name.
        resolve: gives the counterpart of a dotted name, or raises LookupError.
        executed: says of a module's name whether its source is executed as it is, over the map.
    """

    def __init__(self, roots: dict[str, Path], resolve: Callable[[str], Any], executed: Callable[[str], bool]) -> None:
        self.roots, self.resolve, self.executed = roots, resolve, executed

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def _source(self, fullname: str) -> Path | None:
        root, *rest = fullname.split(".")
        if root not in self.roots:
            return None
        base = self.roots[root].joinpath(*rest)
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        source = self._source(fullname)
        if source is None:
            return None
        if self.executed(fullname):
            return spec_from_file_location(fullname, source)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(__getattr__=lambda name: self._member(module, name), __path__=[])

    def _member(self, module: ModuleType, name: str) -> Any:
        full = f"{module.__name__}.{name}"
        if name.startswith("__") and name.endswith("__") and name != "__version__":
            raise AttributeError(full)
        if self._source(full) is not None:
            return importlib.import_module(full)
        try:
            value = self.resolve(full)
        except LookupError:
            # `pytest.raises` wants an exception; nothing raises this one.
            value = type(name, (Exception,), {}) if name.endswith(("Exception", "Error")) else Missing(full)
        setattr(module, name, value)
        return value
