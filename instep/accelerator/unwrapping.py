"""What lies around a model: a compile, a wrapper of several processes, a forward that computes in another precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from pickle import PicklingError
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from instep.distributed import convert_to_fp32
from instep.strategies import Precision


def without_compile(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` got."""
    return getattr(model, "_orig_mod", model)


def compiled_as(compiled: nn.Module, model: nn.Module) -> nn.Module:
    """Compile a module as another one was; where that is not compiled the module itself.

    The other one stays as it is: what still trains with it keeps its wrapper of several processes.
    """
    known: Any = compiled
    inner = without_compile(compiled)
    if inner is compiled:
        return model
    return compiled if inner is model else type(known)(model, known.dynamo_ctx)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model from torch's DataParallel and DistributedDataParallel.

    Args:
        model: wrapped, compiled, or as it is.
        keep_fp32_wrapper: False also takes off what changes the precision of its forward.
        keep_torch_compile: False also takes off what `torch.compile` put around it.
        recursive: look at the modules inside too, which it changes in place.

    Example:
        >>> from torch import nn
        >>> model = nn.Linear(2, 2)
        >>> extract_model_from_parallel(nn.DataParallel(model)) is model
        True
    """
    inner = without_compile(model)
    while isinstance(inner, (DataParallel, DistributedDataParallel)):
        inner = without_compile(inner.module)
    if recursive:
        for name, child in list(inner.named_children()):
            setattr(inner, name, extract_model_from_parallel(child, True, keep_torch_compile, True))
    if not keep_fp32_wrapper:
        take_off(inner)
        forward = inner.__dict__.get("forward")
        if isinstance(forward, ConvertOutputsToFp32):  # put on by hand
            del inner.forward
            if getattr(forward.model_forward, "__self__", None) is not inner:
                inner.forward = forward.model_forward
    return compiled_as(model, inner) if keep_torch_compile else inner


class ConvertOutputsToFp32:
    """Function that calls another one and converts its 16-bit results to float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise PicklingError(
            "a model whose forward gives float32 cannot be pickled: take that off by "
            "unwrap_model(model, keep_fp32_wrapper=False)"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that converts the 16-bit results of another one to float32.

    Args:
        model_forward: the other function, such as a model's forward.

    Example:
        >>> import torch
        >>> convert_outputs_to_fp32(lambda: torch.ones(1, dtype=torch.bfloat16))()
        tensor([1.])
    """
    return ConvertOutputsToFp32(model_forward)


class _Forward:
    """A module's forward under autocast, with float32 out; bound to the module as a method is.

    So a deep copy of the module (an average of its weights, say) computes with its own.
    """

    def __init__(self, own: Callable[..., Any] | None, precision: Precision) -> None:
        self.own = own  # attribute of the module itself that hid its class's
        self.precision = precision

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A context for each call: a model may call itself.
        context = self.precision.context()
        assert context is not None
        with context:
            output = type(module).forward(module, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)
        return convert_to_fp32(output)


def put_on(model: nn.Module, precision: Precision) -> None:
    """Make a module compute in a precision, where that needs a context."""
    take_off(model)
    if precision.context() is not None:
        model.forward = MethodType(_Forward(model.__dict__.get("forward"), precision), model)


def take_off(model: nn.Module) -> None:
    """Undo `put_on`, if it was done."""
    function = getattr(model.__dict__.get("forward"), "__func__", None)
    if isinstance(function, _Forward):
        del model.forward
        if function.own is not None:
            model.forward = function.own
