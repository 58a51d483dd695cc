"""Adapt a class or function of instep, so that it accepts the arguments of another package.

The names and replacements of these arguments are in `instep.utils.porting`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from instep.utils import porting

Warn = Callable[[str, str], None]
"""Function that gets a key and a text, and warns with this text once per key."""


class _Adapted(type):
    """Metaclass of an adapted class: objects of instep's original class are instances of the adapted class too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__) if "_adapts" in vars(cls) else super().__instancecheck__(instance)


def adapt(thing: Any, module: str, name: str, leaf: str, warn: Warn) -> Any:
    """Return a class or function that accepts another package's arguments; return `thing` if no argument differs.

    Args:
        thing: a class or function of instep.
        module: name of the module in which the adapted class is found.
        name: name of the adapted class in that module.
        leaf: name of the class or function in instep.
        warn: function that is called with advice about an argument: what to write in its place.
    """
    keys = {*porting.RENAMED, *porting.DROPPED, *(owner for owner, _ in porting.VALUES)}
    methods = [key.partition(".")[2] for key in sorted(keys) if key.startswith(f"{leaf}.")]
    if leaf not in keys and not methods:
        return thing
    if not isinstance(thing, type):
        return _taking(thing, leaf, warn)
    members = {"_adapts": leaf, "__doc__": thing.__doc__, "__module__": module, "__qualname__": name}
    if leaf in keys:
        members["__init__"] = _taking(thing.__init__, leaf, warn)
    for method in methods:
        found = thing.__dict__.get(method) or getattr(thing, method)
        is_of_class = isinstance(found, classmethod)
        taking = _taking(found.__func__ if is_of_class else found, f"{leaf}.{method}", warn)
        members[method] = classmethod(taking) if is_of_class else taking
    return _Adapted(name, (thing,), members)


def adapt_found(target: str, module: str, name: str, warn: Warn) -> Any:
    """Find a class or function of instep by its full name, and `adapt` it to another package's arguments."""
    home, _, leaf = target.rpartition(".")
    return adapt(getattr(import_module(home), leaf), module, name, leaf, warn)


def _taking(function: Callable[..., Any], key: str, warn: Warn) -> Callable[..., Any]:
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        for name in [name for name in given if name not in parameters]:
            _rename(key, name, given, warn)
        for (owner, name), values in porting.VALUES.items():
            if owner == key and isinstance(given.get(name), str) and given[name] in values:
                old, given[name] = given[name], values[given[name]]
                warn(f"{key}({name}={old})", f"{key}({name}={old!r}): write {name}={given[name]!r}")
        return function(*args, **given)

    return call


def _rename(key: str, name: str, given: dict[str, Any], warn: Warn) -> None:
    new = porting.RENAMED.get(key, {}).get(name)
    if new is None and name not in porting.DROPPED.get(key, {}):
        return  # unchanged, since the function itself refuses the argument, with an error that says what to write
    value = given.pop(name)
    warn(f"{key}({name})", f"{key}({name}=): {porting.instead_of(key, name)}")
    if new is None or ((key, name) in porting.ADDED and not value):  # gpus=0 means that no GPU is used
        return
    added, _, kind = porting.ADDED.get((key, name), "").partition("=")
    if added:
        given.setdefault(added, kind.strip('"'))
    given[new] = value
