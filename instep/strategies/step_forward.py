"""Run step methods such as `training_step` with the work that strategies add only to a module's `forward`.

`StepForward` is for DDP, DeepSpeed and DataParallel, which wrap a module and do their work in the wrapper's `forward`.
`GatheredMethods` is for FSDP2, which puts hooks around a module's `forward`: it uses these hooks for other methods too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import nn

_NAME = "_gathered_methods"


class StepForward(nn.Module):
    """Module whose `forward` calls a method of another module.

    DDP prepares its reduction of gradients in `forward`. If a step method was called directly, the ranks would have
    different gradients.

    Args:
        module: module that has the methods.
        context: context manager for each call, or None.
        method: name of the method to call. It is looked up in the module's class, because the attribute of the object
            may be this `StepForward`. None: the first argument of `forward` is the name.
    """

    def __init__(
        self, module: nn.Module, context: AbstractContextManager[Any] | None = None, method: str | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.context = context
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.method is not None:
            return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
        step = getattr(self.module, args[0])
        if self.context is None:
            return step(*args[1:], **kwargs)
        with self.context:
            return step(*args[1:], **kwargs)


class GatheredMethods:
    """Gather the weights of an FSDP2 module around calls of its methods, once for nested calls.

    This object replaces the hooks that `fully_shard` puts around a module's forward, and also works for other methods.

    torch's `register_fsdp_forward_method` gathers for each method separately: if `training_step` calls `self(batch)`,
    the weights would be released after that inner call, and gathered again in the backward.

    Args:
        module: a sharded module. The object is stored in the module, so use `gathered_methods` to get it.
    """

    def __init__(self, module: Any) -> None:
        state = module._get_fsdp_state()
        self._before, self._after = state._pre_forward, state._post_forward
        self._inside = False
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._inside else self._before(module, args, kwargs)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self._inside else self._after(module, args, output)

    def through(self, method: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Wrap a method so that weights are gathered before the call and released after it.

        Args:
            method: bound method of the module, which may be compiled.
            module: module whose weights are gathered.
        """

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            args, kwargs = self._before(module, args, kwargs)
            self._inside = True
            try:
                output = method(*args, **kwargs)
            finally:
                self._inside = False
            return self._after(module, args, output)

        return call


def gathered_methods(module: nn.Module) -> GatheredMethods:
    """Return the `GatheredMethods` object of a sharded module; the first call makes it."""
    made: GatheredMethods | None = module.__dict__.get(_NAME)
    if made is None:
        made = module.__dict__[_NAME] = GatheredMethods(module)
    return made
