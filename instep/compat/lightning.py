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

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
        if leaf not in porting.LIGHTNING_MODULES:  # no ModuleNotFoundError: of that `from ... import` loses the text
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
            _adapted[name, target] = _adapt(getattr(import_module(home), leaf), name, leaf)
        return _adapted[name, target]
    if name in porting.GONE:
        _warn(name, f"{name} does nothing: leave it out ({porting.GONE[name]})")
        return lambda *args, **kwargs: None
    if name in porting.DEFINED:
        imports, value = porting.DEFINED[name]
        _warn(name, f"{name}: write `{imports}` and `{name} = {value}`")
        made: dict[str, Any] = {}
        exec(f"{imports}\nvalue = {value}", made)  # our own text, which `migrate` writes into scripts
        return made["value"]
    if name in porting.LIGHTNING_MODULES:
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


# ---- arguments that have another name, or are left out


class _Adapted(type):
    """Type of a class of instep that takes Lightning's arguments; objects of instep's own class count as its own."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__) if "_adapts" in vars(cls) else super().__instancecheck__(instance)


def _adapt(thing: Any, name: str, leaf: str) -> Any:
    """Let a class or function take the arguments that the table has for it."""
    keys = {*porting.RENAMED, *porting.DROPPED, *(owner for owner, _ in porting.VALUES)}
    methods = [key.partition(".")[2] for key in sorted(keys) if key.startswith(f"{leaf}.")]
    if leaf not in keys and not methods:
        return thing
    if not isinstance(thing, type):
        return _taking(thing, leaf)
    members = {"_adapts": leaf, "__doc__": thing.__doc__, "__module__": __name__, "__qualname__": name}
    if leaf in keys:
        members["__init__"] = _taking(thing.__init__, leaf)
    for method in methods:
        found = thing.__dict__.get(method) or getattr(thing, method)
        is_of_class = isinstance(found, classmethod)
        taking = _taking(found.__func__ if is_of_class else found, f"{leaf}.{method}")
        members[method] = classmethod(taking) if is_of_class else taking
    return _Adapted(name, (thing,), members)


def _taking(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        for name in [name for name in given if name not in parameters]:
            _rename(key, name, given)
        for (owner, name), values in porting.VALUES.items():
            if owner == key and isinstance(given.get(name), str) and given[name] in values:
                old, given[name] = given[name], values[given[name]]
                _warn(f"{key}({name}={old})", f"{key}({name}={old!r}): write {name}={given[name]!r}")
        return function(*args, **given)

    return call


def _rename(key: str, name: str, given: dict[str, Any]) -> None:
    new = porting.RENAMED.get(key, {}).get(name)
    if new is None and name not in porting.DROPPED.get(key, {}):
        return  # refused by the function, with what to write
    value = given.pop(name)
    _warn(f"{key}({name})", f"{key}({name}=): {porting.instead_of(key, name)}")
    if new is None or ((key, name) in porting.ADDED and not value):  # gpus=0 said that there is none
        return
    added, _, kind = porting.ADDED.get((key, name), "").partition("=")
    if added:
        given.setdefault(added, kind.strip('"'))
    given[new] = value
