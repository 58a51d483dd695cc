"""`save_hyperparameters`: store the arguments of an object's `__init__`, which are read from Python's call stack."""

from __future__ import annotations

import functools
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

from instep.errors import UsageError
from instep.utils.warn import warn_user

CLASS_PATH = "_class_path"
"""Name of the hyperparameter with the path of the class that a configuration chose. If hyperparameters lack this one,
none of them comes from a configuration."""

_configured: ContextVar[tuple[type, Mapping[str, Any]] | None] = ContextVar("_configured", default=None)


@contextmanager
def configured_as(cls: type, values: Mapping[str, Any]) -> Iterator[None]:
    """In the `with` block, make `save_hyperparameters` store plain values in place of the arguments of an object.

    It is used when a configuration file builds the object: an argument such as a backbone is stored as its class path
    and arguments, which can be saved, and not as an object.

    Args:
        cls: class of the objects that are built in the block.
        values: arguments of the object as in the configuration, with the path of its class under `CLASS_PATH`.
    """
    token = _configured.set((cls, values))
    try:
        yield
    finally:
        _configured.reset(token)


class AttributeDict(dict[str, Any]):
    """A dict whose items can also be read and set as attributes.

    Example:
        >>> hparams = AttributeDict(lr=0.1)
        >>> hparams.lr
        0.1
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            there = ", ".join(map(str, self)) or "none"
            raise AttributeError(f"no hyperparameter {name!r}; there are: {there}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def plain_values(value: Any) -> Any:
    """Convert hyperparameters to the form in a checkpoint: plain dicts and lists in place of other containers.

    Dataclasses, pydantic models, Namespaces, OmegaConf's containers (with resolved interpolations) and other mappings
    become dicts (or lists), and namedtuples become tuples. Classes, functions and partials of them become `Named`.
    Other values are not changed.

    Example:
        >>> plain_values(Namespace(lr=0.1, net=AttributeDict(width=8)))
        {'lr': 0.1, 'net': {'width': 8}}
    """
    from instep.utils.named import Named, is_code, name_of  # imported late: not needed to import the Trainer

    def as_key(key: Any) -> Any:  # a dataclass stays as it is, since a dict cannot be a key
        return plain_values(key) if isinstance(key, tuple) or is_code(key) else key

    if isinstance(value, functools.partial) and is_code(value.func):
        return Named(name_of(value.func), plain_values(value.args), plain_values(value.keywords))
    if is_code(value):
        return Named(name_of(value))
    value = as_container(value)
    if isinstance(value, Mapping):
        return {as_key(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(map(plain_values, value))
    if type(value) in (set, frozenset):
        return type(value)(map(as_key, value))
    return _of_items(plain_values, value)


def as_container(value: Any) -> Any:
    """Convert a configuration object to a dict of its fields or a list of its items; return other values unchanged."""
    omegaconf = sys.modules.get("omegaconf")  # if OmegaConf is not imported, no value can be its object
    if omegaconf is not None and isinstance(value, omegaconf.Container):
        return omegaconf.OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Namespace):
        return vars(value)
    if _is_model(value):
        named = {name: getattr(value, name) for name in type(value).model_fields}
        return named["root"] if list(named) == ["root"] else {**named, **(value.model_extra or {})}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if type(value).__module__.startswith(("pydantic.", "pydantic_core.")) and not hasattr(value, "get_secret_value"):
        return sys.modules["pydantic_core"].to_jsonable_python(value)  # objects such as a URL of pydantic
    return value


def _is_model(value: Any) -> bool:
    """Return True if a value is a pydantic model."""
    # If pydantic is not imported yet, no value can be a pydantic model.
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return base is not None and hasattr(base, "model_fields") and isinstance(value, base)


def with_attributes(value: Any) -> Any:
    """Return a copy of a value in which each dict is an `AttributeDict`, so that its items can be read as attributes.

    Example:
        >>> with_attributes({"net": {"width": 8}}).net.width
        8
    """
    if type(value) is dict:
        return AttributeDict({key: with_attributes(item) for key, item in value.items()})
    return _of_items(with_attributes, value)


def _of_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the items of a list or tuple; return any other value unchanged."""
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value


class HyperParameters:
    """Base class of TrainModule and DataModule with `save_hyperparameters` and `hparams`.

    Example:
        >>> class Model(HyperParameters):
        ...     def __init__(self, width: int, depth: int = 2):
        ...         self.save_hyperparameters()
        >>> dict(Model(64).hparams)
        {'width': 64, 'depth': 2}
    """

    # Set on the class, so that an nn.Module has these attributes before its __init__ has run.
    _log_hyperparams: bool = False
    _hparams_name: str | None = None

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Store the arguments of `__init__` as `self.hparams`; they are saved in checkpoints and sent to loggers.

        Call this method in `__init__`. It collects the arguments of this `__init__` call and of the subclasses'
        `__init__` calls around it. If a name occurs several times, the value of the outermost call is used, which is
        the value that the user passed. In memory the values are not changed. A checkpoint holds dicts in place of
        dataclasses, pydantic models, Namespaces and OmegaConf's containers, and the names of classes and functions. A
        value that would need pickle is an error before the first step.

        Args:
            args: nothing: store all arguments. Names: store only these arguments. Or dicts, Namespaces, dataclasses and
                pydantic models, whose entries become the hyperparameters.
            ignore: names of arguments to leave out.
            frame: frame of `__init__`, if `__init__` calls this method through another function.
            logger: whether loggers get the hyperparameters.

        Raises:
            UsageError: this method was not called in `__init__`, a name is not an argument, or a value has no named
                entries.

        Example:
            >>> class Model(HyperParameters):
            ...     def __init__(self, backbone, lr=0.1):
            ...         self.save_hyperparameters(ignore="backbone")
            >>> Model(backbone=object()).hparams.lr
            0.1
        """
        caller = inspect.currentframe()
        given = _init_arguments(self, frame or (caller and caller.f_back))
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        if not args:
            if given is None:
                raise UsageError(
                    "save_hyperparameters() was not called from __init__, so there are no arguments to collect. Call "
                    "it in __init__, pass frame=, or pass the hyperparameters as a dict."
                )
            chosen = given
        else:
            chosen = {}
            for arg in args:
                chosen.update(_named(arg, given or {}))
                if not isinstance(arg, str):
                    self._hparams_name = next((k for k, v in (given or {}).items() if v is arg), None)
        chosen = {name: value for name, value in chosen.items() if name not in ignored}
        configured = _configured.get()
        if configured is not None and type(self) is configured[0] and self._hparams_name is None:
            chosen |= {name: value for name, value in configured[1].items() if name in chosen or name == CLASS_PATH}
        from torch import nn  # imported late: loggers import this file without torch

        modules = [name for name, value in chosen.items() if isinstance(value, nn.Module)]
        if modules:
            warn_user(
                f"save_hyperparameters keeps {', '.join(modules)}: each is an instance of `nn.Module` and is already "
                f"saved with its weights. Leave them out: save_hyperparameters(ignore={modules!r})."
            )
        self._log_hyperparams = logger
        self.hparams.update(chosen)
        for name in ignored:
            # A base class may have called this method without this `ignore`, and so have stored the argument.
            self.hparams.pop(name, None)
        self._hparams_initial = deepcopy(self.hparams)

    @property
    def hparams(self) -> AttributeDict:
        """The hyperparameters; changes of this dict are saved too."""
        if "_hparams" not in vars(self):
            self._hparams = AttributeDict()
        return self._hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as `save_hyperparameters` stored them, without later changes."""
        return deepcopy(vars(self).get("_hparams_initial", AttributeDict()))


def _init_arguments(obj: object, frame: FrameType | None) -> dict[str, Any] | None:
    """Return the arguments of all running `__init__` calls of an object, outermost last; None if there is no call."""
    found: dict[str, Any] | None = None
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("__init__", "__post_init__") and code.co_argcount:
            own, *names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = frame.f_locals
            if values.get(own) is obj:
                found = {**(found or {}), **{name: values[name] for name in names if name in values}}
                if code.co_flags & inspect.CO_VARKEYWORDS:
                    varargs = bool(code.co_flags & inspect.CO_VARARGS)
                    found.update(values.get(code.co_varnames[len(names) + 1 + varargs], {}))
        frame = frame.f_back
    return found


def _named(arg: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the hyperparameters for one positional argument of `save_hyperparameters`: a name or a container."""
    if isinstance(arg, str):
        if arg not in given:
            raise UsageError(
                f"save_hyperparameters({arg!r}): __init__ has no such argument; it has {', '.join(given) or 'none'}."
            )
        return {arg: given[arg]}
    if isinstance(arg, Mapping):
        return arg
    if isinstance(entries := as_container(arg), dict):
        return entries
    raise UsageError(
        f"save_hyperparameters got a {type(arg).__name__}. Pass names of __init__ arguments, or a dict, Namespace, "
        "dataclass or pydantic model."
    )
