"""The two ways in which a call of a step method reaches what a strategy does around a module's `forward`.

`StepForward` is for engines that own the call: DDP, DeepSpeed and DataParallel do their work in the `forward` of a
module that they wrap. `GatheredMethods` is for FSDP2, which wraps nothing: its hooks on the module's own
`forward` serve other methods here too.
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

    DDP arms its reducer in `forward`; a step method called directly would leave each rank with gradients of its own.

    Args:
        module: has the methods.
        context: entered around each call.
        method: the method's name, looked up in the module's class, where the object's own attribute of that name is
            what comes here; None: `forward` takes the name as its first argument.
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
    """Gathers the weights of a sharded module around the outermost one of its methods that is called.

    Stands in for the hooks that `fully_shard` puts around a module's forward, for other methods too.

    torch's `register_fsdp_forward_method` gathers for each method by itself. So a `training_step` that calls
    `self(batch)` would find its weights let go after that, and its backward would gather them once more.

    Args:
        module: sharded; it keeps this object, so make it by `gathered_methods`.
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
        """Wrap a method so that weights are gathered before it and released after it.

        Args:
            method: a bound method of the module, perhaps compiled.
            module: whose weights.
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
    """Return the `GatheredMethods` of a sharded module, made at the first call."""
    made: GatheredMethods | None = module.__dict__.get(_NAME)
    if made is None:
        made = module.__dict__[_NAME] = GatheredMethods(module)
    return made
