"""instep's classes under Lightning's names, so that a script runs before it is ported.

Each name warns once, with what to write instead. A name without a counterpart raises an AttributeError, or an
ImportError, that says what to do. The table of names is `instep.utils.porting`; `instep migrate` reads it too, and
ports the script. Nothing is loaded before it is used.

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
from importlib import import_module
from typing import Any

from instep.compat import tables
from instep.compat.adapting import adapt_found
from instep.compat.door import NameFinder, defined
from instep.utils import porting
from instep.utils.warn import warn_user

__path__: list[str] = []  # marks this module as a package; the finder below makes the modules in it

_warned: set[str] = set()
_adapted: dict[tuple[str, str], Any] = {}  # (Lightning's name, instep's full name) -> adapted class


def __getattr__(name: str) -> Any:
    return _find(__name__, name)


def _find(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    target = porting.successor(_canonical(f"{module}.{name}"))
    if target is not None:
        home, _, leaf = target.rpartition(".")
        _warn(f"{name} {target}", f"{name} is {target}: write `from {home} import {leaf}`")
        if (name, target) not in _adapted:
            _adapted[name, target] = adapt_found(target, __name__, name, _warn)
        return _adapted[name, target]
    if name in tables.GONE:
        _warn(name, f"{name} does nothing: leave it out ({tables.GONE[name]})")
        return lambda *args, **kwargs: None
    if name in tables.DEFINED:
        imports, value = tables.DEFINED[name]
        _warn(name, f"{name}: write `{imports}` and `{name} = {value}`")
        return defined(name)
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


sys.meta_path.append(  # this finder is the last one that Python asks, and finds only names of this module
    NameFinder(
        {__name__: "lightning"},
        _find,
        lambda module: module.rpartition(".")[2] in tables.LIGHTNING_MODULES,
        # This is not a ModuleNotFoundError, since `from ... import` would drop its text.
        lambda fullname: ImportError(_missing(fullname), name=fullname),
    )
)
