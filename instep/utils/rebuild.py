"""A module from the plain values that `TrainerCLI` keeps as its hyperparameters.

Where an argument is an object (a backbone, a loss) they hold its class and arguments, so that `load_from_checkpoint`
can build it again. A checkpoint is a stranger's and must not run code, so no parser sees its texts: a text stays a
text, or becomes what the argument's type says by the small tables here. A mapping with a `class_path` is built where
the type admits an object, of a class that `allowed_class` finds.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import decimal
import functools
import inspect
import os
import re
import sys
import typing
import uuid
from argparse import Namespace
from collections import abc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import is_dataclass
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from instep.errors import CheckpointError
from instep.utils.hparams import CLASS_PATH, as_container, configured_as, is_model, with_attributes
from instep.utils.named import Named, is_code, loaded

T = TypeVar("T")
_SPEC = {"class_path", "init_args", "dict_kwargs"}
_PLAIN = (bool, int, float, str, list, tuple, dict)
_OPEN = (Any, object, inspect.Parameter.empty)
_TIME = re.compile(r"(?:(?P<days>-?\d+) days?, )?(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d+)?)")
_CHOICES = {"true": True, "false": False}
_RANGE = re.compile(r"range\((-?\d+)(?:, ?(-?\d+))?(?:, ?(-?\d+))?\)")
_LISTS = (abc.Sequence, abc.Iterable, abc.Collection, abc.MutableSequence)
_MAPPINGS = (abc.Mapping, abc.MutableMapping)

_KINDS = (nn.Module, Optimizer, LRScheduler)
_OF_TORCH = ("torch.nn.modules.", "torch.optim.")
_FUNCTIONS = ("torch.nn.functional", "torch.nn.init")


def allowed_class(path: Any, key: str) -> type:
    """Find a class that a checkpoint may have built.

    Args:
        path: its dotted path.
        key: the argument that it is for, for errors.

    Raises:
        CheckpointError: it is not loaded, or not allowed.
    """
    found = loaded(path)
    if not isinstance(found, type):
        raise _not_imported(path, key)
    if not _is_of_kinds(found):
        raise refused(path, key)
    return found


def _is_of_kinds(found: type) -> bool:
    home = f"{found.__module__}."
    return issubclass(found, _KINDS) and (not home.startswith("torch.") or home.startswith(_OF_TORCH))


def allowed_function(path: Any, owner: type, key: str) -> Any:
    """Find a function that a checkpoint may pass to a class.

    Args:
        path: its dotted path.
        owner: the class.
        key: the argument that it is for, for errors.

    Raises:
        CheckpointError: it is not loaded, or not allowed.
    """
    found, name = loaded(path), str(path).rpartition(".")[2]
    if not _is_allowed_function(found, name, owner):
        raise refused(path, key)
    return found


def _is_allowed_function(found: Any, name: str, owner: type | None) -> bool:
    """Return True for functions of torch that only compute, and for those of the file of `owner`."""
    if name.startswith("_"):
        return False
    if isinstance(found, FunctionType):
        home = found.__module__
        own = owner is not None and home == owner.__module__ and not home.startswith("torch.")
        return home in _FUNCTIONS or own
    places = (vars(torch.nn.functional).get(name), vars(torch).get(name) if hasattr(torch.Tensor, name) else None)
    return isinstance(found, BuiltinFunctionType) and any(found is place for place in places)


def cannot_make(
    cls: type, path: Any, saved: Mapping[str, Any], arguments: Mapping[str, Any], error: TypeError
) -> CheckpointError:
    """Make the error of a class that does not take its arguments.

    Args:
        cls: the class.
        path: the checkpoint.
        saved: its hyperparameters.
        arguments: the program's own arguments.
        error: what the class raised.
    """
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = next((key for key in arguments if key not in parameters and not takes_all), None)
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    lacking = [
        name
        for name, p in list(parameters.items())[1:]
        if p.default is p.empty and p.kind not in several and name not in (*saved, *arguments)
    ]
    give = ", ".join(f"{name}=..." for name in lacking)
    if unknown is not None:
        near = get_close_matches(unknown, list(parameters), 1)
        what = f"it takes no argument {unknown!r}.{f' Did you mean {near[0]!r}?' if near else ''}"
    elif lacking and (others := {name: value for name, value in saved.items() if name not in parameters}):
        what = (
            f"{error}. The checkpoint holds {short(', '.join(f'{name}={value!r}' for name, value in others.items()))}, "
            f"of which {cls.__name__} has no arguments: pass {give} made of these."
        )
    elif lacking:
        why = "they are left out by ignore= or cannot be saved" if saved else "it holds no hyperparameters"
        how = "" if saved else ", or call self.save_hyperparameters() in __init__ before saving"
        what = f"{error}. The checkpoint holds no value of {', '.join(lacking)}: {why}. Pass {give}{how}."
    else:
        what = f"{error}. Pass what does not fit as an argument."
    return CheckpointError(f"cannot make {cls.__name__} from {path}: {what}", path=path)


def _not_imported(path: Any, key: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's {key} is a {short(path)}, which this program has not imported, and a checkpoint must "
        f"not import code. Import it first, or pass {key.partition('.')[0]}=... to load_from_checkpoint."
    )


def refused(what: Any, key: str) -> CheckpointError:
    """Make the error of an argument that is not what a checkpoint may give."""
    return CheckpointError(
        f"the checkpoint's {key} is a {short(what)}. Only modules, optimizers and schedulers that the program has "
        "imported, and functions of torch and of the module's own file, are taken from a checkpoint, where the "
        f"argument's type admits them: pass {key.partition('.')[0]}=... to load_from_checkpoint."
    )


def short(what: Any) -> str:
    """Cut a text, or what a value looks like, to a length for an error."""
    text = what if isinstance(what, str) else repr(what)
    return text if len(text) <= 200 else f"{text[:200]}..."


def build_configured(
    cls: type[T],
    saved: Mapping[str, Any],
    arguments: Mapping[str, Any],
    held: AbstractContextManager[Any] | None = None,
    held_own: AbstractContextManager[Any] | None = None,
) -> T:
    """Make an object of a class, or of the subclass that was configured.

    Args:
        cls: what `load_from_checkpoint` was called on.
        saved: the hyperparameters, with the path of the configured class.
        arguments: what takes the place of saved values. They are the program's, and stay as they are.
        held: what the arguments are built within; `held_own`: the object itself.

    Raises:
        CheckpointError: a value does not fit, or names a class that it may not.
    """
    built = configured_class(cls, saved)
    parameters = inspect.signature(built.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    kept = {key: value for key, value in saved.items() if key not in arguments}
    given = {key: value for key, value in kept.items() if key in parameters or takes_all}
    try:
        with held or nullcontext():
            made = configured_arguments(cls, given | {CLASS_PATH: saved[CLASS_PATH]})
        with configured_as(built, kept), held_own or nullcontext():
            return built(**made, **arguments)
    except CheckpointError:
        raise
    except (ArithmeticError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot make {built.__name__} from its saved configuration: {error}. Pass what does not fit as an "
            "argument of load_from_checkpoint."
        ) from error


def means_the_same(saved: Any, now: Any) -> bool:
    """Return True if two hyperparameters are equal; a class may have another of its names, such as torch.optim.Adam."""
    saved, now = _of_no_arguments(saved), _of_no_arguments(now)
    if isinstance(saved, Named | str) and isinstance(now, Named | str):
        one, other = (value if isinstance(value, Named) else Named(value) for value in (saved, now))
        named_alike = one.path == other.path or (loaded(one.path) or one) is loaded(other.path)
        return named_alike and means_the_same((one.args, one.keywords), (other.args, other.keywords))
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        return saved.keys() == now.keys() and all(means_the_same(saved[key], now[key]) for key in saved)
    if isinstance(saved, list | tuple) and type(saved) is type(now):
        return len(saved) == len(now) and all(map(means_the_same, saved, now))
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        return saved.dtype == now.dtype and torch.equal(saved.cpu(), now.cpu())
    with suppress(Exception):  # arrays do not compare to True or False, other objects of the user as they like
        if saved == now:
            return True
    return repr(saved) == repr(now)


def _of_no_arguments(value: Any) -> Any:
    """Return a configured object without its arguments where it has none."""
    if isinstance(value, Mapping) and "class_path" in value:
        return {key: inner for key, inner in value.items() if inner or key not in ("init_args", "dict_kwargs")}
    return value


def with_structures(cls: type, saved: Mapping[str, Any], of_json: bool = False) -> dict[str, Any]:
    """Build what was saved as dicts or names among the arguments of a class, and leave the rest.

    Args:
        cls: whose arguments; their annotations say which objects: dataclasses, pydantic models, Namespaces and
            OmegaConf's containers.
        saved: the arguments.
        of_json: they come from JSON, which has no tuples, paths and members of enums: these are built too, where the
            annotation says so and the value fits.

    Raises:
        CheckpointError: a dict does not fit its type, or a class or function is none that may be found again.
    """
    hints, built = _hints(cls), with_code(cls, saved)
    for name, value in list(built.items()):
        if of_json and _is_leaf(hints.get(name)):
            with suppress(CheckpointError):  # `load_from_checkpoint` leaves it as it is, too
                built[name] = Building().argument(value, hints[name], name, cls)
        elif isinstance(value, dict | list | tuple) and _is_structure(hints.get(name)):
            try:
                built[name] = Building().argument(value, hints[name], name, cls)
            except CheckpointError:
                raise
            except (ArithmeticError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the checkpoint's {name} cannot be made: {error!r}. Pass {name}=... to load_from_checkpoint."
                ) from error
    return built


def with_code(cls: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Find the classes and functions among the arguments of a class, which were saved as `Named`; the rest stays.

    They are found among what the class says of the argument (its annotation and default), the kinds of which a
    checkpoint may have objects built, functions of torch, and functions of the file of the class. A partial is made of
    what is found, which calls nothing; one of a function of the file has to be said by the class, since it would be
    called with values of the checkpoint.

    Raises:
        CheckpointError: one is nothing of this.
    """
    hints, found = _hints(cls), {}
    for name, value in saved.items():
        defaults = [p.default for p in _parameters(cls) if p.name == name]
        found[name] = _Found(hints.get(name, Any), defaults, str(name), cls).again(value)
    return found


class _Found:
    """Finder of what the values of one argument name."""

    def __init__(self, hint: Any, defaults: list[Any], key: str, owner: type) -> None:
        self.hint, self.defaults, self.key, self.owner = hint, defaults, key, owner

    def again(self, value: Any) -> Any:
        if type(value) is dict:
            return {self.again(name): self.again(inner) for name, inner in value.items()}
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(self.again, value))
        if not isinstance(value, Named):
            return value
        found, partly = loaded(value.path), value.args is not None
        if found is None and not value.path.startswith("<"):
            raise _not_imported(value, self.key)
        if found is None or not self.allows(found, value.path.rpartition(".")[2], partly):
            raise refused(repr(value), self.key)
        if not partly:
            return found
        return functools.partial(found, *self.again(value.args), **self.again(dict(value.keywords or {})))

    def allows(self, found: Any, name: str, partly: bool) -> bool:
        given, bases = self.said
        if any(found is one for one in given):
            return True
        if isinstance(found, type):
            return found in _PLAIN or _is_of_kinds(found) or any(_is_below(found, base) for base in bases)
        return _is_allowed_function(found, name, None if partly else self.owner)

    @functools.cached_property
    def said(self) -> tuple[list[Any], list[type]]:
        """What the class says that the argument may be, and the classes whose subclasses it may be."""
        given, bases = [*_code_in(self.defaults)], []
        hints: list[Any] = []
        with suppress(AttributeError, NameError, TypeError):  # of a field that only type checkers can read
            hints.extend(_within(self.hint, {}))
        for hint in hints:
            origin, inner = get_origin(hint), get_args(hint)
            if origin is type or (origin is abc.Callable and inner):
                bases += [base for base in _within(inner[-1], {}) if _is_class(base) and base not in (object, type)]
            elif is_model(hint):
                given += _code_in([field.default for field in hint.model_fields.values()])
            elif _is_class(hint) and is_dataclass(hint):
                given += _code_in([field.default for field in dataclasses.fields(hint)])
            elif _is_class(hint):
                given += _code_in(getattr(hint, "_field_defaults", None))
        return given + bases, bases


def _is_below(found: type, base: type) -> bool:
    """Return True if a class is below one that a program or package has made for others to be below it.

    Not for Python's own, of which there are subclasses for every purpose; of those in torch it must be in one folder.
    """
    package = base.__module__.partition(".")[0]
    near = found.__module__.rpartition(".")[0] == base.__module__.rpartition(".")[0]
    return (
        base in found.__mro__
        and package not in sys.stdlib_module_names
        and (near or not f"{found.__module__}.".startswith("torch."))
    )


def _code_in(value: Any) -> Iterator[Any]:
    """Yield the classes and functions in plain containers, keys too, and in partials."""
    if isinstance(value, functools.partial):
        yield from (*_code_in(value.func), *_code_in(value.args), *_code_in(value.keywords))
    elif is_code(value):
        yield value
    elif isinstance(value := as_container(value), Mapping):
        for name, inner in value.items():
            yield from (*_code_in(name), *_code_in(inner))
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _code_in(inner)


def _is_structure(hint: Any) -> bool:
    hint, origin = _bare(hint)
    kinds = [kind for part in (origin, *get_args(hint)) for kind in (part, *_bare(part))]
    inner = [kind for part in get_args(hint) for kind in get_args(part)]
    return any(
        is_dataclass(kind) or is_model(kind) or _is_container(kind) or hasattr(kind, "_field_defaults")
        for kind in (*kinds, *inner)
    )


def _is_class(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and get_origin(kind) is None  # in Python 3.10 list[int] is a type, too


def _is_leaf(hint: Any) -> bool:
    """Tell whether a type's values look otherwise in JSON than they are: tuples, paths, enums, torch's own."""
    hint, origin = _bare(hint)
    kinds = [kind for kind in (origin, *get_args(hint), *map(get_origin, get_args(hint))) if _is_class(kind)]
    return any(
        issubclass(kind, tuple | set | frozenset | Enum | PurePath | torch.dtype | torch.device) for kind in kinds
    )


def _is_container(kind: Any) -> bool:
    """Tell whether a type is a Namespace, or a container of OmegaConf."""
    omegaconf = sys.modules.get("omegaconf")
    return _is_class(kind) and (
        issubclass(kind, Namespace) or (omegaconf is not None and issubclass(kind, omegaconf.Container))
    )


def configured_class(cls: type[T], saved: Mapping[str, Any]) -> type[T]:
    """Find the class that was configured, where it is loaded and a subclass of `cls`; else `cls`."""
    try:
        own = allowed_class(saved[CLASS_PATH], "module")
    except CheckpointError:
        return cls
    return own if issubclass(own, cls) else cls


def configured_arguments(cls: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of a module from its hyperparameters.

    Args:
        cls: the module's class, or a base of the one that was configured.
        saved: the hyperparameters, with the path of the configured class.

    Raises:
        CheckpointError: one of them does not fit, or names a class or a function that a checkpoint may not.
    """
    values = {key: value for key, value in saved.items() if key != CLASS_PATH}
    built = configured_class(cls, saved)
    return Building().arguments(with_code(built, values), built, "")


class Unfit(ValueError):
    """A value is not of its argument's type."""


class Building:
    """Builder of arguments from the values of a checkpoint, by the types of the parameters."""

    def text(self, text: str) -> Any:
        return text

    def anything(self, value: Any) -> Any:
        return value

    def made(self, cls: type, arguments: dict[str, Any], partly: bool) -> Any:
        return functools.partial(cls, **arguments) if partly else cls(**arguments)

    def structure(self, cls: type, fields: dict[str, Any]) -> Any:
        return cls(**fields)

    def configuration(self, value: Any, kind: Any, key: str) -> Any:
        """Build a pydantic model, a Namespace or a container of OmegaConf of plain values.

        Raises:
            CheckpointError: the value does not fit, or has a text that would be more than a text there.
        """
        if issubclass(kind, Namespace):
            return kind(**with_attributes(_same(isinstance(value, dict), value)))
        if not is_model(kind):
            if any("${" in text for text in _texts(value)):  # it would read the environment, or call a resolver
                raise refused("text with an interpolation of OmegaConf", key)
            made = sys.modules["omegaconf"].OmegaConf.create(value)
            return _same(isinstance(made, kind), made)
        if _imports(kind):
            raise refused(f"{kind.__name__} with a field whose text is imported (ImportString)", key)
        by_name = (
            {"by_name": True, "by_alias": True}
            if "by_name" in inspect.signature(kind.model_validate).parameters
            else {}
        )
        try:
            return kind.model_validate(value, **by_name)
        except ValueError as error:  # pydantic's ValidationError is one
            raise CheckpointError(
                f"the checkpoint's {key} is no {kind.__name__}: {short(str(error))}. Pass "
                f"{key.partition('.')[0]}=... to load_from_checkpoint."
            ) from error

    # ---- values

    def arguments(self, values: Mapping[str, Any], cls: type, key: str) -> dict[str, Any]:
        hints = _hints(cls)
        return {
            name: self.argument(value, hints.get(name, Any), f"{key}.{name}" if key else str(name), cls)
            for name, value in values.items()
        }

    def argument(self, value: Any, hint: Any, key: str, owner: type) -> Any:
        try:
            return self.value(value, hint, key, owner)
        except Unfit:
            what = f"{type(value).__name__}, {short(repr(value))}"
            raise CheckpointError(
                f"the checkpoint's {key} is a {what}, which is no {_name(hint)} that a checkpoint may give. Pass "
                f"{key.partition('.')[0]}=... to load_from_checkpoint."
            ) from None

    def value(self, value: Any, hint: Any, key: str, owner: type) -> Any:
        """Build a value as the type of its argument says.

        Raises:
            Unfit: it is not of this type.
            CheckpointError: it names what a checkpoint may not.
        """
        hint, origin = _bare(hint)
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            allowed_class(value["class_path"], key)  # also where it stays a mapping: modules build of them
        if origin in (Union, UnionType):
            return self.one_of(value, get_args(hint), key, owner)
        if value is None or hint in (None, NoneType):
            return _same(value is None, value)
        if origin is Literal:
            fitting = [choice for choice in get_args(hint) if type(choice) is type(value) and choice == value]
            return fitting[0] if fitting else _same(False, value)
        if hint in _OPEN or not isinstance(origin, type):
            return self.open(value, key, owner)
        if not isinstance(value, _PLAIN):  # a tensor, a set, an enum's member: no checkpoint can hold worse
            return self.anything(value)
        if is_model(origin) or _is_container(origin):
            return self.configuration(value, origin, key)
        if origin is abc.Callable or getattr(origin, "_is_protocol", False):
            return self.function(value, hint, key, owner)
        if origin is type:
            return self.named_class(value, hint, key, owner)
        if isinstance(value, list | tuple):
            return self.items(value, hint, origin, key, owner)
        if isinstance(value, dict):
            return self.mapping(value, hint, origin, key, owner)
        return self.leaf(value, origin)

    def open(self, value: Any, key: str, owner: type) -> Any:
        """Build a value whose type is not known: objects are built, and texts are not looked into."""
        if isinstance(value, Mapping):
            if isinstance(value.get("class_path"), str) and value.keys() <= _SPEC:
                named = allowed_class(value["class_path"], key)
                given = self.spec_arguments(value, named, key)
                if _can_be_called(named, given):
                    return self.made(named, given, partly=False)
                return dict(value)
            return {name: self.value(inner, Any, f"{key}.{name}", owner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            made = [self.value(inner, Any, key, owner) for inner in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return value

    def one_of(self, value: Any, hints: tuple[Any, ...], key: str, owner: type) -> Any:
        """Build a value as the first type that it fits; a text is no number where texts fit."""
        error: CheckpointError | None = None
        if isinstance(value, str) and str in hints:
            hints = tuple(hint for hint in hints if hint not in (bool, int, float, complex))
        elif not isinstance(value, str):
            hints = tuple(sorted(hints, key=lambda hint: type(value) is not (get_origin(hint) or hint)))
        for hint in sorted(hints, key=lambda hint: _bare(hint)[0] in _OPEN):
            try:
                return self.value(value, hint, key, owner)
            except Unfit:
                continue
            except CheckpointError as refusal:
                error = refusal
        raise error or Unfit

    def spec_arguments(self, value: Mapping[str, Any], named: type, key: str) -> dict[str, Any]:
        parts = [value.get(name) or {} for name in ("init_args", "dict_kwargs")]
        if not all(isinstance(part, Mapping) for part in parts):
            raise refused(f"{named.__name__} whose arguments are no mapping", key)
        return self.arguments({**parts[0], **parts[1]}, named, key)

    def spec(self, value: Mapping[str, Any], base: type, key: str) -> Any:
        """Build an object of a class that is a subclass of its argument's type."""
        named = allowed_class(value["class_path"], key)
        if not issubclass(named, base):
            raise refused(f"{value['class_path']}, which is no {base.__name__}", key)
        return self.made(named, self.spec_arguments(value, named, key), partly=False)

    def function(self, value: Any, hint: Any, key: str, owner: type) -> Any:
        """Find a function, build an object that can be called, or a class with some of its arguments."""
        if isinstance(value, str):
            try:
                return allowed_function(value, owner, key)
            except CheckpointError as error:
                try:
                    value = {"class_path": value}
                    allowed_class(value["class_path"], key)
                except CheckpointError:
                    raise error from None
        if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
            raise Unfit
        named = allowed_class(value["class_path"], key)
        returned = get_args(hint)[1:]
        partly = bool(returned) and _is_class(returned[0]) and issubclass(named, returned[0])
        return self.made(named, self.spec_arguments(value, named, key), partly)

    def named_class(self, value: Any, hint: Any, key: str, owner: type) -> type:
        named = _Found(hint, [], key, owner).again(Named(_same(isinstance(value, str), value)))
        bases = [base for base in get_args(hint) if _is_class(base)]
        return _same(isinstance(named, type) and all(issubclass(named, base) for base in bases), named)

    def items(self, value: Any, hint: Any, origin: type, key: str, owner: type) -> Any:
        inner = get_args(hint)
        names = getattr(origin, "_fields", None)
        if issubclass(origin, tuple) and names is not None:
            hints = typing.get_type_hints(origin)
            given = dict(zip(names, value, strict=False))
            fields = {name: self.value(item, hints.get(name, Any), key, owner) for name, item in given.items()}
            return self.structure(origin, _same(len(value) <= len(names), fields))
        if issubclass(origin, tuple) and inner and inner[-1] is not Ellipsis:
            _same(len(value) == len(inner), value)
            return tuple(self.value(item, of, key, owner) for item, of in zip(value, inner, strict=True))
        made = [self.value(item, inner[0] if inner else Any, key, owner) for item in value]
        if origin in _LISTS:
            return made
        if issubclass(origin, list | tuple | set | frozenset | collections.deque):
            return origin(made)
        if origin in (abc.Set, abc.MutableSet):
            return set(made)
        raise Unfit

    def mapping(self, value: dict[Any, Any], hint: Any, origin: type, key: str, owner: type) -> Any:
        if typing.is_typeddict(origin):
            hints = typing.get_type_hints(origin)
            _same(value.keys() <= hints.keys(), value)
            return {name: self.value(inner, hints[name], f"{key}.{name}", owner) for name, inner in value.items()}
        if origin in _MAPPINGS or issubclass(origin, dict):
            of_key, of_value = (*get_args(hint), Any, Any)[:2]
            made = {
                self.value(name, of_key, key, owner): self.value(inner, of_value, f"{key}.{name}", owner)
                for name, inner in value.items()
            }
            ordered = issubclass(origin, collections.OrderedDict)
            return collections.OrderedDict(made) if ordered else made
        if isinstance(value.get("class_path"), str):
            return self.spec(value, origin, key)
        if hasattr(origin, "__pydantic_validator__") and _imports(origin):
            raise refused(f"{origin.__name__} with a field whose text is imported (ImportString)", key)
        fields = getattr(origin, "_fields", None) or (
            [field.name for field in dataclasses.fields(origin) if field.init] if is_dataclass(origin) else None
        )
        if fields is None:
            raise Unfit
        _same(value.keys() <= set(fields), value)
        hints = _hints(origin)
        made = {name: self.value(inner, hints.get(name, Any), f"{key}.{name}", owner) for name, inner in value.items()}
        return self.structure(origin, made)

    def leaf(self, value: Any, kind: type) -> Any:
        """Build a number, or a text and what is written as one."""
        if kind is str:
            return self.text(_same(isinstance(value, str), value))
        if kind is bool:
            return value if isinstance(value, bool) else _CHOICES[_same(value in _CHOICES, value)]
        if issubclass(kind, Enum):
            found = [member for name, member in kind.__members__.items() if value in (name, member.value)]
            return found[0] if found else _same(False, value)
        if isinstance(value, bool):
            return _same(isinstance(value, kind), value)
        try:
            if kind is int:
                return int(_same(not isinstance(value, float), value))
            if issubclass(kind, float | complex | decimal.Decimal):
                return kind(value)
            if issubclass(kind, int):
                return kind(_same(isinstance(value, int), value))
            if isinstance(value, str):
                return self.written(value, kind)
        except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
            raise Unfit from error
        return _same(isinstance(value, kind), value)

    def written(self, text: str, kind: Any) -> Any:
        """Build what has a form as a text."""
        if issubclass(kind, bytes | bytearray):
            return kind(base64.b64decode(text, validate=True))
        if kind is timedelta:
            parts = _found(_TIME.fullmatch(text)).groupdict()
            return timedelta(**{name: float(part) for name, part in parts.items() if part is not None})
        if kind is range:
            return range(*(int(part) for part in _found(_RANGE.fullmatch(text)).groups() if part is not None))
        if kind is torch.dtype:
            found = vars(torch).get(text.removeprefix("torch."))
            return _same(isinstance(found, torch.dtype), found)
        home = kind.__module__.partition(".")[0]
        if kind in (uuid.UUID, torch.device) or (issubclass(kind, PurePath) and home == "pathlib"):
            return kind(text)  # a path of another package may import and connect by what the text says
        if kind is os.PathLike:
            return self.text(text)
        if home == "jsonargparse":  # one of its restricted texts and paths, of which some open a URL
            remote = {"s", "u"}.intersection(getattr(kind, "_mode", ""))
            return kind(_same(not remote, text))
        return self.anything(_same(isinstance(text, kind), text))


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of plain containers, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from (*_texts(name), *_texts(inner))
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _texts(inner)


def _imports(hint: Any) -> bool:
    """Return True if pydantic would import what a text says, to make a value of this type or of one within it."""
    importing = sys.modules["pydantic"].ImportString
    return any(each is importing or isinstance(each, importing) for each in _within(hint, {}))


def _within(hint: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield a type and all that it is made of: its arguments, the types of its fields, and what is noted of these."""
    if id(hint) in seen:
        return
    seen[id(hint)] = hint
    yield hint
    inner: list[Any] = [get_origin(hint), getattr(hint, "__supertype__", None), *get_args(hint)]
    if isinstance(hint, list):  # of a Callable's arguments
        inner += hint
    elif is_model(hint):
        inner += [part for field in hint.model_fields.values() for part in (field.annotation, *field.metadata)]
    elif (is_dataclass(hint) and isinstance(hint, type)) or typing.is_typeddict(hint) or hasattr(hint, "_fields"):
        inner += typing.get_type_hints(hint, include_extras=True).values()
    elif isinstance(hint, TypeVar):
        inner += [hint.__bound__, *hint.__constraints__]
    elif type(hint).__name__ == "TypeAliasType":
        inner.append(getattr(hint, "__value__", None))
    for each in inner:
        if each is not None:
            yield from _within(each, seen)


def _constructors(cls: type) -> list[FunctionType]:
    """List the `__init__` of a class and of its bases, its own one last."""
    return [init for base in reversed(cls.__mro__) if inspect.isfunction(init := vars(base).get("__init__"))]


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    for init in _constructors(cls):
        yield from inspect.signature(init).parameters.values()


def _hints(cls: type) -> dict[str, Any]:
    """Read the types of a class's arguments, of those of its bases too; `Any` where one cannot be found out."""
    hints: dict[str, Any] = {}
    for init in _constructors(cls):
        for name, parameter in inspect.signature(init).parameters.items():
            hint, default = parameter.annotation, parameter.default
            if hint is parameter.empty:
                known = default is not parameter.empty and default is not None
                hints[name] = Union[type(default), Any] if known else Any  # noqa: UP007  `type | Any` is an error in 3.10
                continue
            alone = SimpleNamespace(__annotations__={name: hint})  # one may need what only type checkers import
            try:
                hints[name] = typing.get_type_hints(alone, init.__globals__, include_extras=True)[name]
            except (AttributeError, NameError, SyntaxError, TypeError):
                hints[name] = Any
    return hints


def _bare(hint: Any) -> tuple[Any, Any]:
    """Return a type without what only says more about it, and its origin, or itself."""
    while True:
        if get_origin(hint) is Annotated or getattr(get_origin(hint), "_name", "") in ("Required", "NotRequired"):
            hint = get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        else:
            return hint, get_origin(hint) or hint


def _same(fits: bool, value: Any) -> Any:
    if not fits:
        raise Unfit
    return value


def _found(match: re.Match[str] | None) -> re.Match[str]:
    if match is None:
        raise Unfit
    return match


def _can_be_called(cls: type, arguments: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(cls).bind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
