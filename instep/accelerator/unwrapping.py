"""Put wrappers on a model and take them off: torch.compile, DataParallel and DDP, a forward in another precision."""

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
    """Return the original module of a compiled one; return any other module unchanged."""
    return getattr(model, "_orig_mod", model)


def compiled_as(compiled: nn.Module, model: nn.Module) -> nn.Module:
    """Compile `model` with the same options as `compiled`. If `compiled` is not compiled, return `model` unchanged.

    `compiled` itself is not changed: the training may still use it, with its DataParallel or DDP wrapper.
    """
    known: Any = compiled
    inner = without_compile(compiled)
    if inner is compiled:
        return model
    return compiled if inner is model else type(known)(model, known.dynamo_ctx)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model from inside torch's DataParallel and DistributedDataParallel.

    Args:
        model: a model that may be wrapped or compiled.
        keep_fp32_wrapper: whether to keep a wrapper that changes the precision of the model's forward.
        keep_torch_compile: whether to keep the wrapper of `torch.compile`.
        recursive: whether to unwrap the modules inside too, which changes the model in place.

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
        if isinstance(forward, ConvertOutputsToFp32):  # the user has wrapped the forward by convert_outputs_to_fp32
            del inner.forward
            if getattr(forward.model_forward, "__self__", None) is not inner:
                inner.forward = forward.model_forward
    return compiled_as(model, inner) if keep_torch_compile else inner


class ConvertOutputsToFp32:
    """Function that calls another function and converts its 16-bit results to float32."""

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
    """Return a function that calls another function and converts its 16-bit results to float32.

    Args:
        model_forward: the other function, such as a model's forward.

    Example:
        >>> import torch
        >>> convert_outputs_to_fp32(lambda: torch.ones(1, dtype=torch.bfloat16))()
        tensor([1.])
    """
    return ConvertOutputsToFp32(model_forward)


class _Forward:
    """Forward of a module under autocast, with float32 outputs. It is bound to the module like a method.

    Because of this, a deep copy of the module, for instance for averaged weights, computes with its own weights.
    """

    def __init__(self, own: Callable[..., Any] | None, precision: Precision) -> None:
        # `forward` that was set on the module object and replaced the one of its class; None if there was none
        self.own = own
        self.precision = precision

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Make a new context for each call, since a model may call itself.
        context = self.precision.context()
        assert context is not None
        with context:
            output = type(module).forward(module, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)
        return convert_to_fp32(output)


def put_on(model: nn.Module, precision: Precision) -> None:
    """Make a module's forward run in a precision, if the precision needs an autocast context."""
    take_off(model)
    if precision.context() is not None:
        model.forward = MethodType(_Forward(model.__dict__.get("forward"), precision), model)


def take_off(model: nn.Module) -> None:
    """If `put_on` has replaced the forward, restore the original one."""
    function = getattr(model.__dict__.get("forward"), "__func__", None)
    if isinstance(function, _Forward):
        del model.forward
        if function.own is not None:
            model.forward = function.own
