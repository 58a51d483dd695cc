"""A callback built from plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.callbacks.base import HOOKS, Callback
from instep.utils.checks import choice, wrong


class LambdaCallback(Callback):
    """A callback whose hooks are given as functions.

    Args:
        **hooks: functions by the hook's name, called with the hook's arguments: `trainer, module, ...`.

    Raises:
        SettingError: there is no such hook, or what was given cannot be called.

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
            setattr(self, name, function)  # set on this object; the Trainer sees it as a hook too
