"""A module from the plain values that `TrainerCLI` keeps as its hyperparameters.

Where an argument is an object (a backbone, a loss) they hold its class and arguments, so that `load_from_checkpoint`
can build it again. A checkpoint must not run code: it can name only classes that the program has imported, and only
modules, optimizers and schedulers; and functions of torch and of the module's own file. That holds for texts too:
jsonargparse imports what a text names where an argument's type is a class or a function, and reads YAML in it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import PurePath
from types import BuiltinFunctionType, NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from instep.errors import CheckpointError
from instep.utils.hparams import CLASS_PATH, configured_as

T = TypeVar("T")
_ALLOWED = (nn.Module, Optimizer, LRScheduler)
_PLAIN = (str, int, float, complex, bytes, NoneType, list, tuple, dict, set, frozenset, PurePath, Enum)
_OF_TORCH = ("torch.nn.functional", "torch")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def build_configured(cls: type[T], saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> T:
    """Make an object of a class, or of the subclass that was configured.

    Args:
        cls: what `load_from_checkpoint` was called on.
        saved: the hyperparameters, with the path of the configured class.
        arguments: what takes the place of saved values.

    Raises:
        CheckpointError: a value does not fit, or names a class that it may not.
    """
    from jsonargparse import ArgumentError, ArgumentParser  # late: only what a configuration built needs it

    values = configured_arguments(cls, saved, arguments)
    built = _configured_class(cls, saved)
    parameters = inspect.signature(built.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(built, "module", fail_untyped=False)
    plain = {key: value for key, value in values.items() if key in parameters or takes_all}
    kept = {key: value for key, value in saved.items() if key not in arguments}
    try:
        with configured_as(built, kept):
            return parser.instantiate(parser.parse_object({"module": plain})).module
    except (ArgumentError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot make {built.__name__} from its saved configuration: {error}. Pass what does not fit as an "
            "argument of load_from_checkpoint."
        ) from error


def configured_arguments(cls: type, saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module in a checkpoint, as jsonargparse takes them, with some replaced.

    Args:
        cls: the module's class, or a base of the one that was configured.
        saved: the hyperparameters, with the path of the configured class.
        arguments: what takes the place of saved values.

    Raises:
        CheckpointError: one of them names a class or a function that a checkpoint may not.
    """
    values = {key: value for key, value in saved.items() if key != CLASS_PATH and key not in arguments}
    _check_arguments(values, "", _configured_class(cls, saved))
    return {**values, **arguments}


def _configured_class(cls: type[T], saved: Mapping[str, Any]) -> type[T]:
    try:
        own = _named_class(saved[CLASS_PATH], "module")
    except CheckpointError:
        return cls
    return own if issubclass(own, cls) else cls


def _check_arguments(values: Mapping[str, Any], key: str, cls: type) -> None:
    """Check the arguments of a class, by their types."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters
            try:
                hints |= dict.fromkeys(parameters, Any) | get_type_hints(base.__init__, include_extras=True)
            except (NameError, TypeError):  # of names that only type checkers see: they may be classes
                hints |= dict.fromkeys(parameters, object)
    for name, value in values.items():
        _check(value, f"{key}.{name}" if key else name, hints.get(name, object), cls)


def _check(value: Any, key: str, hint: Any, owner: type) -> None:
    if isinstance(value, str):
        _check_text(value, key, hint, owner)
    elif isinstance(value, Mapping) and value.get("class_path") is not None:
        named = _named_class(value["class_path"], key)
        if not issubclass(named, _ALLOWED):
            raise _refused(value["class_path"], key)
        for arguments in (inner for inner in value.values() if isinstance(inner, Mapping)):
            _check_arguments(arguments, key, named)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            _check(inner, f"{key}.{name}", hint, owner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, key, hint, owner)


def _check_text(text: str, key: str, hint: Any, owner: type) -> None:
    if hint is not Any and not _may_name(hint):
        return
    import yaml  # late: only what a configuration made needs it

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    if isinstance(value, (dict, list)):
        _check(value, key, hint, owner)
    elif hint is not Any and _DOTTED.fullmatch(text.strip()):
        root, _, _ = text.strip().partition(".")
        if root not in sys.modules and find_spec(root) is None:
            return  # such as data.csv
        module, found = _find(text.strip())
        if isinstance(found, type):
            allowed = issubclass(found, _ALLOWED)
        elif isinstance(found, BuiltinFunctionType):
            allowed = module in _OF_TORCH
        else:  # what cannot be called, such as torch.float32, does nothing
            allowed = found is not None and (
                not callable(found) or getattr(found, "__module__", None) in (owner.__module__, _OF_TORCH[0])
            )
        if not allowed:
            raise _refused(text, key)


def _may_name(hint: Any) -> bool:
    """Whether texts of this type may name a class or a function."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal or hint in (Any, ...):
        return False
    if origin is Annotated:
        return _may_name(arguments[0])
    if arguments and origin is not type and "Callable" not in str(origin):
        return any(_may_name(argument) for argument in arguments)
    return not (isinstance(hint, type) and issubclass(hint, _PLAIN))


def _refused(path: Any, key: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's {key} is a {path}. Only modules, optimizers and schedulers that the program has imported, "
        "and functions of torch and of the module's own file, are taken from a checkpoint: pass "
        f"{key.partition('.')[0]}=... to load_from_checkpoint."
    )


def _find(path: str) -> tuple[str, Any]:
    """The module of a dotted path, and what it names there; None where that is not imported."""
    module, _, name = path.rpartition(".")
    return module, getattr(sys.modules.get(module), name, None)


def _named_class(path: Any, key: str) -> type:
    """A class that is imported already."""
    module, found = _find(str(path))
    if not isinstance(found, type):
        raise CheckpointError(
            f"the checkpoint's {key} is a {path}, which this program has not imported, and a checkpoint must not "
            f"import code. Import {module or path} first, or pass {key.partition('.')[0]}=... to load_from_checkpoint."
        )
    return found
