"""A module from the plain values that `TrainerCLI` keeps as its hyperparameters.

Where an argument is an object (a backbone, a loss) they hold its class and arguments, so that `load_from_checkpoint`
can build it again. A checkpoint must not run code: it can name only classes that the program has imported, and only
modules, optimizers and schedulers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from instep.errors import CheckpointError
from instep.utils.hparams import CLASS_PATH, configured_as

T = TypeVar("T")
_ALLOWED = (nn.Module, Optimizer, LRScheduler)


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

    values = configured_arguments(saved, arguments)
    try:
        own = _named_class(saved[CLASS_PATH])
    except CheckpointError:
        own = cls
    built = own if issubclass(own, cls) else cls
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


def configured_arguments(saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module in a checkpoint, as jsonargparse takes them, with some replaced.

    Raises:
        CheckpointError: one of them names a class that a checkpoint may not.
    """
    values = {key: value for key, value in saved.items() if key != CLASS_PATH and key not in arguments}
    for key, value in values.items():
        _check(value, key)
    return {**values, **arguments}


def _check(value: Any, key: str) -> None:
    if isinstance(value, Mapping):
        path = value.get("class_path")
        if path is not None and not issubclass(_named_class(path, key), _ALLOWED):
            raise CheckpointError(
                f"the checkpoint's {key} is a {path}. Only modules, optimizers and schedulers are built from a "
                f"checkpoint: pass {key.partition('.')[0]}=... to load_from_checkpoint."
            )
        for name, inner in value.items():
            _check(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner, key)


def _named_class(path: Any, key: str = "the module") -> type:
    """A class that is imported already."""
    module, _, name = str(path).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type):
        raise CheckpointError(
            f"the checkpoint's {key} is a {path}, which this program has not imported, and a checkpoint must not "
            f"import code. Import {module or path} first, or pass {key.partition('.')[0]}=... to load_from_checkpoint."
        )
    return found
