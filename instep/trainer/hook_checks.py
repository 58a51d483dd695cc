"""A module's hooks, checked before a run: none missing, none that nothing would call, no setting against them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from types import CodeType
from typing import TYPE_CHECKING, Any

from instep.callbacks.base import Callback
from instep.errors import HookError, UsageError
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.trainer.module import TrainModule
from instep.utils.porting import HOOKS_GONE, HOOKS_UNCALLED

if TYPE_CHECKING:
    from instep.trainer.session import Session

_LIKE_A_HOOK = 0.8  # difflib's ratio: on_train_epoch_finish is 0.82 of on_train_epoch_end
_told: set[tuple[type, str]] = set()

_NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
}


def check_hooks(run: Session) -> None:
    """Raise where the module's hooks do not fit what is to run.

    Raises:
        HookError: one is missing, or of Lightning 1.x; the text names its successor.
        UsageError: a setting has no effect in manual optimization.
    """
    module, name = run.module, type(run.module).__name__
    if run.rank == 0:
        for owner, base in ((module, TrainModule), *((callback, Callback) for callback in run.callbacks)):
            _warn_of_uncalled(owner, base)
    for old, successor in HOOKS_GONE.items():
        if callable(getattr(module, old, None)):
            raise HookError(
                f"{name}.{old} is not called by instep (nor by Lightning 2). Use {successor}; what the steps returned "
                "can be kept in an attribute."
            )
    for needed in _NEEDED.get(run.fn, ()):
        if not is_overridden(module, needed, TrainModule):
            raise HookError(f"{name} has no {needed}; trainer.{run.fn} needs it")
    if run.fn == "fit" and not module.automatic_optimization:
        for setting in ("gradient_clip_val", "global_batch_size"):
            if getattr(run.settings, setting) is not None:
                raise UsageError(
                    f"Trainer({setting}=...) has no effect in manual optimization, where training_step does it: leave "
                    "it out, and use self.clip_gradients or your own accumulation there."
                )
        if run.accumulate != 1:
            raise UsageError(
                "Trainer(accumulate_grad_batches=...) has no effect in manual optimization: leave it out and step "
                "every N batches in training_step."
            )


def _warn_of_uncalled(owner: Any, base: type) -> None:
    """Warn once of each `on_...` method that nothing calls and that was probably meant as a hook."""
    kind = type(owner)
    theirs = [cls for cls in kind.__mro__ if issubclass(cls, base) and not cls.__module__.startswith("instep.")]
    names = {name for cls in theirs for name, value in vars(cls).items() if callable(value)}
    names |= {name for name, value in vars(owner).items() if callable(value)}
    names = {name for name in names if name.startswith("on_") and not hasattr(base, name)}
    names = {name for name in names if (kind, name) not in _told}
    if not names:
        return
    hooks = [name for name in dir(base) if name.startswith("on_")]
    other, whose = (Callback, "callbacks") if base is TrainModule else (ModuleHooks, "modules")
    called = set(_names_in_code(theirs))
    for name in sorted(names - called):
        if hasattr(other, name):
            advice = f"only {whose} have this hook"
        elif name in HOOKS_UNCALLED:
            advice = f"it is of Lightning 1.x. Use {HOOKS_UNCALLED[name]}"
        elif close := get_close_matches(name.replace("_val_", "_validation_"), hooks, 1, _LIKE_A_HOOK):
            advice = f"did you mean {close[0]}?"
        else:
            continue
        _told.add((kind, name))
        warnings.warn(f"{kind.__name__}.{name} is not called by anything: {advice}", stacklevel=2)


def _names_in_code(classes: list[type]) -> Iterator[str]:
    """The names of attributes and functions that the methods of these classes use."""
    members = [getattr(value, "__code__", None) for cls in classes for value in vars(cls).values()]
    codes = [code for code in members if isinstance(code, CodeType)]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
