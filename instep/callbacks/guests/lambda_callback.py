"""`LambdaCallback`: a callback whose hooks are plain functions, without a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.callbacks.base import HOOKS, Callback
from instep.utils.checks import choice, wrong


class LambdaCallback(Callback):
    """A callback whose hooks are the functions that are passed to its constructor.

    Args:
        **hooks: a function for each hook's name; it is called with the arguments of the hook: `trainer, module, ...`.

    Raises:
        SettingError: a name is not that of a hook, or its value is not callable.

    Example:
        >>> callback = LambdaCallback(on_train_end=lambda trainer, module: print("done"))
        >>> callback.on_train_end(None, None)
        done
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            choice(*HOOKS)("LambdaCallback's hook", name)
            if not callable(function):
                raise wrong(name, function, "a function that takes the hook's arguments")
            setattr(self, name, function)  # the Trainer also finds a hook that is an attribute of the object
