"""Find out why a model cannot be trained, for the messages of errors about optimizers and losses without a graph."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

_LOOKED_AT = 100  # largest number of items of a container that are searched
_NAMED = 3


def hidden_parameters(module: nn.Module) -> dict[str, list[Tensor]]:
    """Find parameters that torch does not find, since they or their modules are in a plain list, tuple, set or dict.

    Returns:
        A dict from the path of the attribute that has the container, such as `decoder.layers`, to the parameters.

    Example:
        >>> net = nn.Module()
        >>> net.layers = [nn.Linear(2, 1, bias=False)]
        >>> [(path, len(hidden)) for path, hidden in hidden_parameters(net).items()]
        [('layers', 1)]
    """
    seen = set(module.parameters())
    found: dict[str, list[Tensor]] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_") and isinstance(value, list | tuple | set | Mapping):
                hidden = [p for held in _held(value) for p in held if p not in seen]
                if hidden:
                    found[f"{path}.{name}" if path else name] = list(dict.fromkeys(hidden))
    return found


def _held(value: Any, depth: int = 3) -> Iterator[Iterable[Tensor]]:
    """Yield the parameters of each item of a container."""
    if isinstance(value, nn.Module):
        yield value.parameters()
    elif isinstance(value, nn.Parameter):
        yield [value]
    elif isinstance(value, list | tuple | set | Mapping) and depth:
        for item in islice(value.values() if isinstance(value, Mapping) else value, _LOOKED_AT):
            yield from _held(item, depth - 1)


def say_hidden(module: nn.Module, paths: Iterable[str]) -> str:
    """Return a text that says where torch does not find parameters, and what to use there in place of a container."""
    owner, where = type(module).__name__, list(paths)
    names = ", ".join(f"{owner}.{path}" for path in where[:_NAMED])
    holder: Any = module.get_submodule(where[0].rpartition(".")[0])
    kind = type(getattr(holder, where[0].rpartition(".")[2])).__name__
    return (
        f"{names} is a plain {kind}, so torch does not see the parameters in it: they are not trained, saved or moved "
        "to the device. Use nn.ModuleList or nn.ModuleDict (nn.ParameterList, nn.ParameterDict) there"
    )


def why_no_parameters(module: nn.Module) -> str:
    """Return why a module has no parameters for an optimizer; "" if it has parameters."""
    if any(True for _ in module.parameters()):
        return ""
    hidden = hidden_parameters(module)
    if hidden:
        return say_hidden(module, hidden)
    return f"{type(module).__name__} has no parameters. Set its layers as attributes of it in __init__"


def why_no_optimizer(error: TypeError | ValueError, module: nn.Module) -> str:
    """Return which argument the constructor of an optimizer refused, and why; "" if other code raised the error.

    Args:
        error: error that was raised.
        module: module to train.
    """
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    made = next((frame for frame in frames if _makes_optimizer(frame)), None)
    if made is None:
        return ""
    names = made.f_code.co_varnames[1 : made.f_code.co_argcount + made.f_code.co_kwonlyargcount]
    given = {name: made.f_locals[name] for name in names if name in made.f_locals}
    kind = type(made.f_locals["self"]).__name__
    for name, value in given.items():
        if inspect.isroutine(value):
            called = getattr(value, "__name__", repr(value))
            return f"{kind}({name}=...) got the method {called} itself; call it: {called}()"
        if isinstance(value, nn.Module):
            return f"{kind}({name}=...) got a module, {type(value).__name__}; give it that module's .parameters()"
        if isinstance(value, str):
            return f"{kind} got {name}={value!r}, a text; give it a number"
    if "empty parameter list" in str(error):
        why = why_no_parameters(module)
        return f"there is nothing to train: {why}" if why else ""
    return ""


def _makes_optimizer(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def why_no_graph(modules: Iterable[nn.Module], optimized: Iterable[Tensor] = ()) -> str:
    """Return the likely reason why a loss does not depend on any trained parameter.

    Args:
        modules: modules that are trained.
        optimized: parameters of the optimizers.
    """
    modules = list(modules)
    if not torch.is_grad_enabled():
        return "gradients are turned off (torch.set_grad_enabled(False), no_grad or inference_mode). Turn them on"
    parameters = {p: name for module in modules for name, p in module.named_parameters()}
    frozen = [name for p, name in parameters.items() if not p.requires_grad]
    whose = " and ".join(type(module).__name__ for module in modules)
    for module in modules:
        if why := why_no_parameters(module):
            return why
    if parameters and len(frozen) == len(parameters):
        return (
            f"all parameters of {whose} are frozen (requires_grad=False). Unfreeze those that are to be trained, with "
            ".requires_grad_(True); to train nothing, return no optimizer"
        )
    mine = list(optimized)
    if mine and not any(p.requires_grad for p in mine):
        return "all parameters of the optimizer are frozen (requires_grad=False). Give it those that are to be trained"
    cut = "Compute it from the module's parameters, without .detach(), .item() or torch.no_grad()"
    if frozen:
        more = f" and {len(frozen) - _NAMED} more" if len(frozen) > _NAMED else ""
        return (
            f"it depends on no parameter that is trained. {len(frozen)} of {len(parameters)} parameters of {whose} are "
            f"frozen ({', '.join(frozen[:_NAMED])}{more}): does it depend on those alone? {cut}"
        )
    return f"it was cut off from the parameters. {cut}"
