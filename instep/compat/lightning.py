"""Lightning's names for instep's classes, so that a script runs before it is ported.

Each name warns once, with what to write instead; one that has no counterpart is an AttributeError, or an ImportError,
that says what to do. What stands for what is said by `instep.utils.porting`, which `instep migrate` reads too, and
`instep migrate` is what ports the script. Nothing is loaded before it is used.

Example:
    >>> import warnings
    >>> warnings.simplefilter("ignore", FutureWarning)
    >>> from instep.compat import lightning as L
    >>> from instep.compat.lightning.pytorch.callbacks import ModelCheckpoint
    >>> L.LightningModule.__mro__[1]
    <class 'instep.trainer.module.TrainModule'>
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from instep.compat import tables
from instep.compat.adapting import adapt
from instep.utils import porting
from instep.utils.warn import warn_user

__path__: list[str] = []  # a package, whose modules `_Finder` makes

_warned: set[str] = set()
_adapted: dict[tuple[str, str], Any] = {}  # by Lightning's name, and instep's with its module


def __getattr__(name: str) -> Any:
    return _find(__name__, name)


class _Names(ModuleType):
    """Module of Lightning: `pytorch.callbacks` and so on."""

    def __getattr__(self, name: str) -> Any:
        return _find(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Maker of the modules below this one, which are names only."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        leaf = fullname.rpartition(".")[2]
        if leaf not in tables.LIGHTNING_MODULES:  # no ModuleNotFoundError: of that `from ... import` loses the text
            raise ImportError(_missing(fullname), name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())  # asked last, and of this module's own names only


def _find(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    target = porting.successor(_canonical(f"{module}.{name}"))
    if target is not None:
        home, _, leaf = target.rpartition(".")
        _warn(f"{name} {target}", f"{name} is {target}: write `from {home} import {leaf}`")
        if (name, target) not in _adapted:
            _adapted[name, target] = adapt(getattr(import_module(home), leaf), __name__, name, leaf, _warn)
        return _adapted[name, target]
    if name in tables.GONE:
        _warn(name, f"{name} does nothing: leave it out ({tables.GONE[name]})")
        return lambda *args, **kwargs: None
    if name in tables.DEFINED:
        imports, value = tables.DEFINED[name]
        _warn(name, f"{name}: write `{imports}` and `{name} = {value}`")
        made: dict[str, Any] = {}
        exec(f"{imports}\nvalue = {value}", made)  # our own text, which `migrate` writes into scripts
        return made["value"]
    if name in tables.LIGHTNING_MODULES:
        return import_module(f"{module}.{name}")
    raise AttributeError(_missing(f"{module}.{name}"))


def _canonical(name: str) -> str:
    return porting.canonical(name.removeprefix("instep.compat.")) or ""


def _missing(name: str) -> str:
    return f"{name} is not there: {porting.advice(_canonical(name))}. `instep migrate` lists such places."


def _warn(what: str, text: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warn_user(f"instep.compat.lightning: {text}", FutureWarning)
