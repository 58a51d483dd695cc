"""What gathers the weights of a sharded module: the outermost of its methods that is called, and it alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

_NAME = "_sharded_entry"


class Entry:
    """Stands in for the hooks that `fully_shard` puts around a module's forward, for other methods too.

    torch's `register_fsdp_forward_method` gathers for each method by itself. So a `training_step` that calls
    `self(batch)` would find its weights let go after that, and its backward would gather them once more.

    Args:
        module: sharded; it keeps the entry, so make it by `entry_of`.
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

    def through(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with weights gathered before it and let go after it.

        Args:
            method: a bound one of the module.
        """
        module: Any = method.__self__  # type: ignore[attr-defined]

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


def entry_of(module: nn.Module) -> Entry:
    """The entry of a sharded module."""
    entry: Entry | None = module.__dict__.get(_NAME)
    if entry is None:
        entry = module.__dict__[_NAME] = Entry(module)
    return entry
