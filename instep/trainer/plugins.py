"""Callbacks, loggers and hooks that the user plugs into a run: completed, ordered and checked before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from types import CodeType
from typing import Any

from instep.callbacks.base import Callback
from instep.data import DataModule
from instep.errors import HookError, SettingError, UsageError
from instep.trainer.context import RunContext
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.trainer.module import TrainModule
from instep.trainer.settings import Settings
from instep.utils.porting import HOOKS_GONE, HOOKS_UNCALLED
from instep.utils.warn import warn_user

_LIKE_A_HOOK = 0.8  # difflib's ratio: on_train_epoch_finish is 0.82 of on_train_epoch_end
_warned: set[tuple[type, str]] = set()

_NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
}


# ---- callbacks and loggers


def saves(callback: Callback) -> bool:
    """Return whether a callback is a ModelCheckpoint, or acts as one: it can save now."""
    return hasattr(callback, "save_now")


def default_callbacks(settings: Settings, enable_checkpointing: bool | None) -> list[Callback]:
    """Add the default callbacks to the user's; those that save stand last, since they save the others' state.

    Args:
        settings: the Trainer's.
        enable_checkpointing: as the user gave it.

    Raises:
        SettingError: a ModelCheckpoint was given although checkpoints are turned off.
    """
    callbacks = [callback for callback in settings.callbacks if not saves(callback)]
    savers = [callback for callback in settings.callbacks if saves(callback)]
    if savers and enable_checkpointing is False:
        raise SettingError(
            "enable_checkpointing=False, but callbacks has a ModelCheckpoint. Leave one of them out.",
            field="enable_checkpointing",
        )
    from instep import callbacks as room  # its names load when used: each default only when it is on

    if settings.fast_dev_run:
        savers = []
        callbacks = [callback for callback in callbacks if not isinstance(callback, room.EarlyStopping)]
    if settings.max_time is not None:
        if any(isinstance(callback, room.Timer) for callback in callbacks):
            raise SettingError(
                f"max_time={settings.max_time} makes a Timer, but callbacks has one too. Leave one of them out.",
                field="max_time",
            )
        callbacks.append(room.Timer(settings.max_time))
    if settings.barebones:
        return callbacks
    if settings.enable_model_summary and not any(isinstance(c, room.ModelSummary) for c in callbacks):
        callbacks.append(room.ModelSummary())
    if settings.enable_progress_bar and not any(isinstance(c, room.ProgressBar) for c in callbacks):
        callbacks.append(room.ProgressBar())
    if settings.enable_checkpointing and not savers:
        savers = [room.ModelCheckpoint()]
    return callbacks + savers


def add_module_callbacks(callbacks: list[Callback], module: TrainModule) -> list[Callback]:
    """Merge the Trainer's callbacks with those of `configure_callbacks`, which replace the ones of the same type.

    Raises:
        SettingError: two of them keep their state under the same key.
    """
    own = module.configure_callbacks()
    own = [own] if isinstance(own, Callback) else list(own or ())
    kinds = {type(callback) for callback in own}
    merged = sorted([c for c in callbacks if type(c) not in kinds] + own, key=saves)
    keys = [callback.state_key for callback in merged if callback.state_dict()]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise SettingError(
            f"two callbacks keep their state under the same key {', '.join(twice)}. Give one of them another "
            "state_key.",
            field="callbacks",
        )
    return merged


def start_loggers(ctx: RunContext, module: TrainModule, datamodule: DataModule | None) -> None:
    """Choose the run folder, where anything will be written, and open the loggers in it."""
    trainer = ctx.trainer
    if trainer.loggers or trainer.checkpoint_callback is not None:
        folder = trainer.run_folder.choose(ctx)
        for logger in trainer.loggers:
            logger.start(folder, trainer.is_global_zero)
    params: dict[str, Any] = {}
    for owner in (datamodule, module):
        if owner is not None and owner._log_hyperparams:
            params.update(owner.hparams_initial)
    if params and ctx.fn == "fit":
        for logger in trainer.loggers:
            logger.log_hyperparams(params)


# ---- hooks


def check_hooks(ctx: RunContext) -> None:
    """Raise where the module's hooks do not fit the run.

    Raises:
        HookError: one is missing, or of Lightning 1.x; the text names its successor.
        UsageError: a setting has no effect in manual optimization.
    """
    module, name = ctx.module, type(ctx.module).__name__
    if ctx.rank == 0:
        for owner, base in ((module, TrainModule), *((callback, Callback) for callback in ctx.callbacks)):
            _warn_of_uncalled(owner, base)
    for old, successor in HOOKS_GONE.items():
        if callable(getattr(module, old, None)):
            raise HookError(
                f"{name}.{old} is not called by instep (nor by Lightning 2). Use {successor}; what the steps returned "
                "can be kept in an attribute."
            )
    for needed in _NEEDED.get(ctx.fn, ()):
        if not is_overridden(module, needed, TrainModule):
            raise HookError(f"{name} has no {needed}; trainer.{ctx.fn} needs it")
    if ctx.fn == "fit" and not module.automatic_optimization:
        for setting in ("gradient_clip_val", "global_batch_size"):
            if getattr(ctx.settings, setting) is not None:
                raise UsageError(
                    f"Trainer({setting}=...) has no effect in manual optimization, where training_step does it: leave "
                    "it out, and use self.clip_gradients or your own accumulation there."
                )
        if ctx.settings.accumulate_grad_batches != 1:
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
    names = {name for name in names if (kind, name) not in _warned}
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
        _warned.add((kind, name))
        warn_user(f"{kind.__name__}.{name} is not called by anything: {advice}")


def _names_in_code(classes: list[type]) -> Iterator[str]:
    """Give the names of attributes and functions that the methods of these classes use."""
    members = [getattr(value, "__code__", None) for cls in classes for value in vars(cls).values()]
    codes = [code for code in members if isinstance(code, CodeType)]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
