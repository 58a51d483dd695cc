"""What a checkpoint may name: classes and functions that the program has loaded, of an allow-list.

Modules, optimizers and schedulers, of torch's own those of `torch.nn` and `torch.optim` only: others of its modules
hold code or talk to other processes (`torch.fx`, `torch.jit`, `torch.distributed`). Functions of `torch.nn.functional`,
those of `torch` that are methods of a tensor too, and those of the file of the class that takes them. Nothing is
imported to look a name up, and no `__getattr__` is asked: a package's own may import.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from instep.errors import CheckpointError

_KINDS = (nn.Module, Optimizer, LRScheduler)
_OF_TORCH = ("torch.nn.modules.", "torch.optim.")
_FUNCTIONAL = "torch.nn.functional"


def allowed_class(path: Any, key: str) -> type:
    """A class that a checkpoint may have built.

    Args:
        path: its dotted path.
        key: the argument that it is for, for errors.

    Raises:
        CheckpointError: it is not loaded, or not allowed.
    """
    found = _loaded(path)
    if not isinstance(found, type):
        raise CheckpointError(
            f"the checkpoint's {key} is a {short(path)}, which this program has not imported, and a checkpoint must "
            f"not import code. Import it first, or pass {key.partition('.')[0]}=... to load_from_checkpoint."
        )
    home = f"{found.__module__}."
    if not issubclass(found, _KINDS) or (home.startswith("torch.") and not home.startswith(_OF_TORCH)):
        raise refused(path, key)
    return found


def allowed_function(path: Any, owner: type, key: str) -> Any:
    """A function that a checkpoint may pass to a class.

    Args:
        path: its dotted path.
        owner: the class.
        key: the argument that it is for, for errors.

    Raises:
        CheckpointError: it is not loaded, or not allowed.
    """
    found, name = _loaded(path), str(path).rpartition(".")[2]
    home = str(getattr(found, "__module__", None))
    if isinstance(found, FunctionType):
        own = home == owner.__module__ and not home.startswith("torch.")
        good = home == _FUNCTIONAL or own
    else:
        places = (vars(torch.nn.functional).get(name), vars(torch).get(name) if hasattr(torch.Tensor, name) else None)
        good = isinstance(found, BuiltinFunctionType) and any(found is place for place in places)
    if not good or name.startswith("_"):
        raise refused(path, key)
    return found


def refused(what: Any, key: str) -> CheckpointError:
    """The error of an argument that is not what a checkpoint may give."""
    return CheckpointError(
        f"the checkpoint's {key} is a {short(what)}. Only modules, optimizers and schedulers that the program has "
        "imported, and functions of torch and of the module's own file, are taken from a checkpoint, where the "
        f"argument's type admits them: pass {key.partition('.')[0]}=... to load_from_checkpoint."
    )


def short(what: Any) -> str:
    """A text, or what a value looks like, cut to a length for an error."""
    text = what if isinstance(what, str) else repr(what)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _loaded(path: Any) -> Any:
    """What loaded modules have under a dotted path; None where there is no such thing."""
    parts = path.split(".") if isinstance(path, str) and len(path) < 1000 else []
    for split in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:split]))
        if not isinstance(found, ModuleType):
            continue
        for part in parts[split:]:
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
        return found
    return None
