"""Build the arguments of a module from a checkpoint, which has plain values and names of classes and functions.

A checkpoint is not trusted, and must not be able to run code. So strings are not parsed as code or configuration, and
nothing is imported. If the checkpoint names a class, an object is built only if the class is a module, optimizer or
scheduler that the program has imported already and that the type of the argument allows. The types of the arguments
also decide which values become a dataclass, an enum member, a path, a torch dtype or a torch device. Any other value
is an error: the message has the name of the argument, which the program then has to pass itself.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import sys
import typing
from argparse import Namespace
from collections import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
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
from instep.utils.hparams import CLASS_PATH, AttributeDict, as_container, configured_as, with_attributes
from instep.utils.named import Named, is_code, loaded

T = TypeVar("T")
_SPEC = {"class_path", "init_args", "dict_kwargs"}
_PLAIN = (bool, int, float, str, list, tuple, dict)
_OPEN = (Any, object, inspect.Parameter.empty)
_COLLECTIONS = {
    **dict.fromkeys((list, abc.Sequence, abc.Iterable, abc.Collection, abc.MutableSequence), list),
    **dict.fromkeys((set, abc.Set, abc.MutableSet), set),
    **{kind: kind for kind in (tuple, frozenset)},
}
_MAPPINGS = {
    **dict.fromkeys((dict, abc.Mapping, abc.MutableMapping, AttributeDict), dict),
    **{kind: kind for kind in (collections.OrderedDict, collections.Counter)},
}

_KINDS = (nn.Module, Optimizer, LRScheduler)
_OF_TORCH = ("torch.nn.modules.", "torch.optim.")
_FUNCTIONS = ("torch.nn.functional", "torch.nn.init")


# ---- errors


def cannot_make(
    cls: type, path: Any, saved: Mapping[str, Any], arguments: Mapping[str, Any], error: TypeError
) -> CheckpointError:
    """Return the error for a class that does not accept its arguments.

    Args:
        cls: the class.
        path: path of the checkpoint.
        saved: hyperparameters in the checkpoint.
        arguments: arguments that the program passed.
        error: error that the class raised.
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
        listed = _short(", ".join(f"{name}={value!r}" for name, value in others.items()))
        what = (
            f"{error}. The checkpoint holds {listed}, "
            f"of which {cls.__name__} has no arguments: pass {give} made of these."
        )
    elif lacking:
        why = "they are left out by ignore= or cannot be saved" if saved else "it holds no hyperparameters"
        how = "" if saved else ", or call self.save_hyperparameters() in __init__ before saving"
        what = f"{error}. The checkpoint holds no value of {', '.join(lacking)}: {why}. Pass {give}{how}."
    else:
        what = f"{error}. Pass what does not fit as an argument."
    return CheckpointError(f"cannot make {cls.__name__} from {path}: {what}", path=path)


def _refused(what: Any, key: str) -> CheckpointError:
    """Return the error for an argument with a value that a checkpoint is not allowed to give."""
    return CheckpointError(
        f"the checkpoint's {key} is a {_short(what)}. Only modules, optimizers and schedulers that the program has "
        "imported, and functions of torch and of the module's own file, are taken from a checkpoint, where the "
        f"argument's type admits them. {_pass(key)}"
    )


def _pass(key: str) -> str:
    return f"Pass {key.partition('.')[0]}=... to load_from_checkpoint."


def _short(what: Any) -> str:
    """Return a text, or the `repr` of a value, cut to a length that fits into an error message."""
    text = what if isinstance(what, str) else repr(what)
    return text if len(text) <= 200 else f"{text[:200]}..."


@contextmanager
def _making(what: str, how: str) -> Iterator[None]:
    """Raise a CheckpointError in place of an error that a constructor raises inside the block."""
    try:
        yield
    except (CheckpointError, Unfit):
        raise
    except (ArithmeticError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}. {how}") from error


# ---- objects built from the hyperparameters


def build_configured(cls: type[T], saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> T:
    """Build an object of a class, or of the subclass that the configuration chose.

    Args:
        cls: class whose `load_from_checkpoint` was called.
        saved: hyperparameters in the checkpoint, with the path of the configured class.
        arguments: values that the program passed, which replace saved values and are used unchanged.

    Raises:
        CheckpointError: a saved value does not fit the type of its argument, or names a class that is not allowed.
    """
    built = configured_class(cls, saved)
    parameters = inspect.signature(built.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    kept = {key: value for key, value in saved.items() if key not in arguments}
    given = {key: value for key, value in kept.items() if key in parameters or takes_all}
    with _making(
        f"cannot make {built.__name__} as it was configured", "Pass what does not fit to load_from_checkpoint."
    ):
        made = configured_arguments(cls, given | {CLASS_PATH: saved[CLASS_PATH]})
        with configured_as(built, kept):
            return built(**made, **arguments)


def configured_class(cls: type[T], saved: Mapping[str, Any]) -> type[T]:
    """Return the configured class if the program has imported it and it is a subclass of `cls`; otherwise `cls`."""
    try:
        own = _allowed_class(saved[CLASS_PATH], "module")
    except CheckpointError:
        return cls
    return own if issubclass(own, cls) else cls


def configured_arguments(cls: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Build the arguments of a module from its hyperparameters.

    Args:
        cls: class of the module, or a base class of the configured class.
        saved: hyperparameters in the checkpoint, with the path of the configured class.

    Raises:
        CheckpointError: a saved value does not fit the type of its argument, or names a class or function that is not
            allowed.
    """
    values = {key: value for key, value in saved.items() if key != CLASS_PATH}
    built = configured_class(cls, saved)
    return Building().arguments(with_code(built, values), built, "")


def with_structures(cls: type, saved: Mapping[str, Any], of_json: bool = False) -> dict[str, Any]:
    """Return the arguments of a class, with objects in place of the plain values and names that were saved for them.

    Args:
        cls: the class. The annotations of its arguments say what is built: dataclasses and Namespaces. Objects of other
            classes that are saved as plain values have to be passed by the program.
        saved: the saved arguments.
        of_json: whether the arguments come from JSON, which has no tuples, paths and enum members: these are built
            too, where the annotation has them.

    Raises:
        CheckpointError: a value does not fit the type of its argument, or names a class or function that is not
            allowed.
    """
    hints, built = _hints(cls), with_code(cls, saved)
    for name, value in list(built.items()):
        hint = hints.get(name, Any)
        if _was_object(value, hint) or (of_json and _is_not_in_json(hint)):
            built[name] = Building().argument(value, hint, name, cls)
    return built


def _is_not_in_json(hint: Any) -> bool:
    """Return True if a type contains a type that JSON does not have and stores as a string, a number or a list."""
    kinds = (tuple, set, frozenset, Enum, PurePath, torch.dtype, torch.device)
    return any(_is_class(kind) and issubclass(kind, kinds) for kind in _within(hint, {}))


def _was_object(value: Any, hint: Any) -> bool:
    """Return True if the type `hint` of the argument shows that `value` may have been saved in place of an object."""
    kinds = [kind for kind in _within(hint, {}) if _is_class(kind)]
    was_one = _is_of_package if isinstance(value, str) else _is_saved_as_plain  # the string may be a URL of pydantic
    return isinstance(value, str | dict | list | tuple) and any(map(was_one, kinds))


def _is_saved_as_plain(kind: type) -> bool:
    """Return True for a class whose objects are saved as plain values, without the name of the class."""
    of_dict = issubclass(kind, abc.Mapping) and not typing.is_typeddict(kind) and _MAPPINGS.get(kind) is not dict
    of_fields = is_dataclass(kind) or issubclass(kind, Namespace) or hasattr(kind, "_fields")
    return of_dict or of_fields or _is_of_package(kind)


def _is_of_package(kind: type) -> bool:
    """Return True for classes of pydantic and OmegaConf, whose objects are saved as plain values.

    Their objects are never built from a checkpoint, since that may import a module named in a text, or read environment
    variables.
    """
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__}
    # dataclasses of pydantic have attributes whose names begin with "__pydantic"
    of_pydantic = any(name.startswith("__pydantic") for name in dir(kind))
    return of_pydantic or not homes.isdisjoint(("omegaconf", "pydantic", "pydantic_core"))


# ---- classes and functions


def _allowed_class(path: Any, key: str) -> type:
    """Return a class by its dotted path, if a checkpoint may build objects of this class."""
    found = loaded(path)
    if found is None:
        raise _not_imported(path, key)
    if not isinstance(found, type) or not _is_of_kinds(found):
        raise _refused(path, key)
    return found


def _not_imported(path: Any, key: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's {key} is a {_short(path)}, which this program has not imported, and a checkpoint must "
        f"not import code. Import it, or do without: {_pass(key)}"
    )


def _is_of_kinds(found: type) -> bool:
    home = f"{found.__module__}."
    return issubclass(found, _KINDS) and (not home.startswith("torch.") or home.startswith(_OF_TORCH))


def _is_allowed_function(found: Any, name: str, owner: type | None) -> bool:
    """Return True for functions of torch that only compute, and for functions in the file of the class `owner`."""
    if name.startswith("_"):
        return False
    if isinstance(found, FunctionType):
        home = found.__module__
        own = owner is not None and home == owner.__module__ and not home.startswith("torch.")
        return home in _FUNCTIONS or own
    places = (vars(torch.nn.functional).get(name), vars(torch).get(name) if hasattr(torch.Tensor, name) else None)
    return isinstance(found, BuiltinFunctionType) and any(found is place for place in places)


def with_code(cls: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class, with classes and functions in place of the names that stand for them (`Named`).

    A name may stand for a class or function in the annotation or default of the argument, for a class that a checkpoint
    may build objects of, for a function of torch, or for a function in the file of the class. A saved
    `functools.partial` is built again, which does not call the function. But the function would later be called with
    values from the checkpoint, so a function in the file of the class is allowed in a partial only if the annotation
    or default has it.

    Raises:
        CheckpointError: a name stands for something else.
    """
    hints, found = _hints(cls), {}
    for name, value in saved.items():
        defaults = [parameter.default for parameter in _parameters(cls) if parameter.name == name]
        found[name] = _Code(hints.get(name, Any), defaults, str(name), cls).found(value)
    return found


class _Code:
    """Finds the classes and functions that are named in the value of an argument."""

    def __init__(self, hint: Any, defaults: list[Any], key: str, owner: type) -> None:
        self.hint, self.defaults, self.key, self.owner = hint, defaults, key, owner

    def found(self, value: Any) -> Any:
        if type(value) is dict:
            return {self.found(name): self.found(inner) for name, inner in value.items()}
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(self.found, value))
        if not isinstance(value, Named):
            return value
        found, partly = loaded(value.path), value.args is not None
        if found is None and not value.path.startswith("<"):
            raise _not_imported(value, self.key)
        if found is None or not self.allows(found, value.path.rpartition(".")[2], partly):
            raise _refused(repr(value), self.key)
        if not partly:
            return found
        return functools.partial(found, *self.found(value.args), **self.found(dict(value.keywords or {})))

    def allows(self, found: Any, name: str, partly: bool) -> bool:
        given, bases = self.said
        if any(found is one for one in (*given, *bases)):
            return True
        if isinstance(found, type):
            return found in _PLAIN or _is_of_kinds(found) or any(_is_below(found, base) for base in bases)
        return _is_allowed_function(found, name, None if partly else self.owner)

    @functools.cached_property
    def said(self) -> tuple[list[Any], list[type]]:
        """Values that annotation and default of the argument allow, and base classes whose subclasses are allowed."""
        given, bases = [*_code_in(self.defaults)], []
        for hint in _within(self.hint, {}):
            origin, inner = get_origin(hint), get_args(hint)
            if origin in (type, abc.Callable) and inner:
                bases += [base for base in _within(inner[-1], {}) if _is_class(base) and base not in (object, type)]
            elif _is_class(hint) and is_dataclass(hint):
                given += _code_in([field.default for field in dataclasses.fields(hint)])
        return given, bases


def _is_below(found: type, base: type) -> bool:
    """Return True if the class `found` is allowed where the annotation of an argument allows subclasses of `base`.

    It must be a subclass. `base` must not be a class of Python's standard library, since a subclass of such a class may
    do anything. If `found` is a class of torch, its module must be in the same package as that of `base`, such as
    `torch.optim`.
    """
    package = base.__module__.partition(".")[0]
    near = found.__module__.rpartition(".")[0] == base.__module__.rpartition(".")[0]
    return (
        base in found.__mro__
        and package not in sys.stdlib_module_names
        and (near or not f"{found.__module__}.".startswith("torch."))
    )


def _code_in(value: Any) -> Iterator[Any]:
    """Yield the classes and functions in a value: inside partials, containers and keys of dicts."""
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


# ---- building of values as the types of the arguments require


class Unfit(ValueError):
    """Raised when a value does not fit the type of its argument."""


class Building:
    """Builds arguments from the values in a checkpoint, by the types of the parameters."""

    def text(self, text: str) -> Any:
        return text

    def anything(self, value: Any) -> Any:
        return value

    def made(self, cls: type, arguments: dict[str, Any], partly: bool) -> Any:
        return functools.partial(cls, **arguments) if partly else cls(**arguments)

    def structure(self, cls: type, fields: dict[str, Any]) -> Any:
        return cls(**fields)

    def arguments(self, values: Mapping[str, Any], cls: type, key: str) -> dict[str, Any]:
        hints = _hints(cls)
        return {
            name: self.argument(value, hints.get(name, Any), f"{key}.{name}" if key else str(name), cls)
            for name, value in values.items()
        }

    def argument(self, value: Any, hint: Any, key: str, owner: type) -> Any:
        try:
            with _making(f"the checkpoint's {key} cannot be made", _pass(key)):
                return self.value(value, hint, key, owner)
        except Unfit:
            what = f"{type(value).__name__}, {_short(repr(value))}"
            name = hint.__name__ if _is_class(hint) else str(hint)
            raise CheckpointError(
                f"the checkpoint's {key} is a {what}, which is no {name} that a checkpoint may give. {_pass(key)}"
            ) from None

    def value(self, value: Any, hint: Any, key: str, owner: type) -> Any:
        """Build a value by the type of its argument.

        Raises:
            Unfit: the value does not fit the type.
            CheckpointError: the value names a class or function that is not allowed.
        """
        hint, origin = _bare(hint)
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            # Checked even if the value stays a mapping, since the module may build an object from the mapping.
            _allowed_class(value["class_path"], key)
        if origin in (Union, UnionType):
            return self.one_of(value, get_args(hint), key, owner)
        if value is None or hint in (None, NoneType):
            return _same(value is None, value)
        if origin is Literal:
            return _same((type(value), value) in [(type(choice), choice) for choice in get_args(hint)], value)
        if hint in _OPEN or not isinstance(origin, type):
            return self.open(value, key, owner)
        # a value that is not plain is a tensor, a set or an enum member: a checkpoint has no others
        if not isinstance(value, _PLAIN):
            return self.anything(value)
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
        """Build a value of unknown type: a mapping with a class path becomes an object, and a string stays a string."""
        if isinstance(value, Mapping):
            if isinstance(value.get("class_path"), str) and value.keys() <= _SPEC:
                named = _allowed_class(value["class_path"], key)
                given = self.spec_arguments(value, named, key)
                return self.made(named, given, partly=False) if _can_be_called(named, given) else dict(value)
            return {name: self.value(inner, Any, f"{key}.{name}", owner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.value(inner, Any, key, owner) for inner in value])
        return value

    def one_of(self, value: Any, hints: tuple[Any, ...], key: str, owner: type) -> Any:
        """Build a value by the first type of a union that it fits; a string stays a string if the union has `str`."""
        error: CheckpointError | None = None
        text = isinstance(value, str)
        fitting = [hint for hint in hints if not (text and str in hints and hint in (bool, int, float, complex))]
        fitting.sort(key=lambda hint: not text and type(value) is not (get_origin(hint) or hint))
        for hint in sorted(fitting, key=lambda hint: _bare(hint)[0] in _OPEN):
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
            raise _refused(f"{named.__name__} whose arguments are no mapping", key)
        return self.arguments({**parts[0], **parts[1]}, named, key)

    def spec(self, value: Mapping[str, Any], base: type, key: str) -> Any:
        """Build an object from a mapping with the path of its class, which must be a subclass of `base`."""
        named = _allowed_class(value["class_path"], key)
        if not issubclass(named, base):
            raise _refused(f"{value['class_path']}, which is no {base.__name__}", key)
        return self.made(named, self.spec_arguments(value, named, key), partly=False)

    def function(self, value: Any, hint: Any, key: str, owner: type) -> Any:
        """Build a callable: find a function, build a callable object, or make a partial of a class."""
        if isinstance(value, str):
            found = loaded(value)
            if _is_allowed_function(found, value.rpartition(".")[2], owner):
                return found
            value = {"class_path": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
            raise Unfit
        named = _allowed_class(value["class_path"], key)
        returned = get_args(hint)[1:]
        partly = bool(returned) and _is_class(returned[0]) and issubclass(named, returned[0])
        return self.made(named, self.spec_arguments(value, named, key), partly)

    def named_class(self, value: Any, hint: Any, key: str, owner: type) -> type:
        named = _Code(hint, [], key, owner).found(Named(_same(isinstance(value, str), value)))
        bases = [base for base in get_args(hint) if _is_class(base)]
        return _same(isinstance(named, type) and all(issubclass(named, base) for base in bases), named)

    def items(self, value: Any, hint: Any, origin: type, key: str, owner: type) -> Any:
        hints = get_args(hint) or (Any, ...)
        if origin is not tuple or hints[-1] is Ellipsis:
            hints = (hints[0],) * len(value)
        _same(len(value) == len(hints), value)
        made = [self.value(item, of, key, owner) for item, of in zip(value, hints, strict=True)]
        return _COLLECTIONS[_same(origin in _COLLECTIONS, origin)](made)

    def mapping(self, value: dict[Any, Any], hint: Any, origin: type, key: str, owner: type) -> Any:
        if origin in _MAPPINGS:
            of_key, of_value, *_ = (*get_args(hint), Any, Any)
            made = {
                self.value(name, of_key, key, owner): self.value(inner, of_value, f"{key}.{name}", owner)
                for name, inner in value.items()
            }
            return _MAPPINGS[origin](made)
        if isinstance(value.get("class_path"), str):
            return self.spec(value, origin, key)
        if origin is Namespace:
            return self.structure(origin, with_attributes(value))
        _same(is_dataclass(origin) and not _is_of_package(origin), value)
        _same(value.keys() <= {field.name for field in dataclasses.fields(origin) if field.init}, value)
        return self.structure(origin, self.arguments(value, origin, key))

    def leaf(self, value: Any, kind: type) -> Any:
        """Build a number, a string, or an object that is saved as a number or string, such as an enum member."""
        if kind is str:
            return self.text(_same(isinstance(value, str), value))
        if issubclass(kind, Enum):
            found = [member for name, member in kind.__members__.items() if value in (name, member.value)]
            # refuse a text or number that is the name of one member and the value of another member
            _same(bool(found) and all(member is found[0] for member in found), value)
            return found[0]
        try:
            if kind in (int, float, complex) and not isinstance(value, bool):
                return kind(_same(kind is not int or not isinstance(value, float), value))
            # a path class of another package could import a module or connect to a server that the text names
            if kind is torch.device or (issubclass(kind, PurePath) and kind.__module__.partition(".")[0] == "pathlib"):
                return kind(_same(isinstance(value, str), value))
        except (ArithmeticError, RuntimeError, ValueError) as error:
            raise Unfit from error
        if kind is torch.dtype:
            value = vars(torch).get(str(value).removeprefix("torch."))
        return self.anything(_same(isinstance(value, kind), value))


def _same(fits: bool, value: Any) -> Any:
    if not fits:
        raise Unfit
    return value


def _can_be_called(cls: type, arguments: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(cls).bind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


# ---- types


def _is_class(kind: Any) -> TypeGuard[type]:
    return isinstance(kind, type) and get_origin(kind) is None  # in Python 3.10 `list[int]` is also an instance of type


def _bare(hint: Any) -> tuple[Any, Any]:
    """Return a type without `Annotated` or an alias, and its origin; a type without an origin is its own origin."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        else:
            return hint, get_origin(hint) or hint


def _within(hint: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield a type and all types inside it, such as its arguments and the types of a dataclass's fields."""
    if id(hint) in seen:
        return
    seen[id(hint)] = hint
    hint, origin = _bare(hint)
    yield hint
    fields = _hints(hint).values() if _is_class(hint) and is_dataclass(hint) else ()
    for inner in (origin, *get_args(hint), *fields):
        yield from _within(inner, seen)


def _constructors(cls: type) -> list[FunctionType]:
    """Return the `__init__` functions of the base classes of a class and of the class itself, which comes last."""
    return [init for base in reversed(cls.__mro__) if inspect.isfunction(init := vars(base).get("__init__"))]


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    for init in _constructors(cls):
        yield from inspect.signature(init).parameters.values()


def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the arguments of a class and its base classes; `Any` for a type that cannot be resolved."""
    hints: dict[str, Any] = {}
    for init in _constructors(cls):
        for name, parameter in inspect.signature(init).parameters.items():
            hint, default = parameter.annotation, parameter.default
            if hint is parameter.empty:
                known = default is not parameter.empty and default is not None
                hints[name] = Union[type(default), Any] if known else Any  # noqa: UP007  `type | Any` is an error in 3.10
                continue
            # each type is resolved alone, since resolving fails for names that are imported for type checkers only
            alone = SimpleNamespace(__annotations__={name: hint})
            try:
                hints[name] = typing.get_type_hints(alone, init.__globals__, include_extras=True)[name]
            except (AttributeError, NameError, SyntaxError, TypeError):
                hints[name] = Any
    return hints


# ---- comparison


def means_the_same(saved: Any, now: Any) -> bool:
    """Return True if two hyperparameters are equal; different dotted names of the same class count as equal."""
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
    with suppress(Exception):  # comparing arrays does not return a bool, and comparing a user's objects may raise
        if saved == now:
            return True
    return repr(saved) == repr(now)


def _of_no_arguments(value: Any) -> Any:
    """Return a configured object without `init_args` and `dict_kwargs` where these are empty."""
    if isinstance(value, Mapping) and "class_path" in value:
        return {key: inner for key, inner in value.items() if inner or key not in ("init_args", "dict_kwargs")}
    return value
