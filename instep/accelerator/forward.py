"""A model's forward in the Accelerator's precision."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from instep.distributed.nested import map_leaves
from instep.strategies import Precision


class _Forward:
    """A module's forward under autocast, with float32 out; bound to the module as a method is.

    So a deep copy of the module (an average of its weights, say) computes with its own.
    """

    def __init__(self, own: Callable[..., Any] | None, precision: Precision) -> None:
        self.own = own  # what the module itself had in place of its class's
        self.precision = precision

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A context for each call: a model may call itself.
        context = self.precision.context()
        assert context is not None
        with context:
            output = type(module).forward(module, *args, **kwargs) if self.own is None else self.own(*args, **kwargs)
        return map_leaves(_to_float32, output)


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


def _to_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16) else leaf
