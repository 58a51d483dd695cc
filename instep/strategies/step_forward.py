"""Two ways in which a call of a step method gets what a strategy adds around a module's `forward`.

`StepForward` is for DDP, DeepSpeed and DataParallel, which do their work in the `forward` of a module that they wrap.
`GatheredMethods` is for FSDP2, which does not wrap modules: it uses FSDP2's hooks on the module's `forward` for other
methods too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import nn

_NAME = "_gathered_methods"


class StepForward(nn.Module):
    """A module whose `forward` calls a method of another one.

    DDP arms its reducer in `forward`. A step method that is called directly would leave the ranks with different
    gradients.

    Args:
        module: module with the methods.
        context: context that is entered around each call, or None.
        method: name of the method. It is looked up in the module's class, because the attribute of the object itself
            leads to this `StepForward`. None: `forward` gets the name as its first argument.
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
    """Gathering of a sharded module's weights around the outermost of its methods that is called.

    It replaces the hooks that `fully_shard` puts around a module's forward, and also works for other methods.

    torch's `register_fsdp_forward_method` gathers for each method separately. So if `training_step` calls
    `self(batch)`, its weights would be released after that call, and its backward would gather them again.

    Args:
        module: a sharded module. It keeps this object, so use `gathered_methods` to make it.
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
        """Wrap a method, so that weights are gathered before it and released after it.

        Args:
            method: a bound method of the module, which may be compiled.
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
    """Return the `GatheredMethods` of a sharded module. It is made by the first call."""
    made: GatheredMethods | None = module.__dict__.get(_NAME)
    if made is None:
        made = module.__dict__[_NAME] = GatheredMethods(module)
    return made
