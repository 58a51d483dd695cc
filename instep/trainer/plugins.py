"""Which callbacks and loggers a run has, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.callbacks.base import Callback
from instep.data import DataModule
from instep.errors import SettingError
from instep.trainer.settings import Settings

if TYPE_CHECKING:
    from instep.trainer.module import TrainModule
    from instep.trainer.session import Session


def saves(callback: Callback) -> bool:
    """Whether it is a ModelCheckpoint, or acts as one: it can save now."""
    return hasattr(callback, "save_now")


def default_callbacks(settings: Settings, enable_checkpointing: bool | None) -> list[Callback]:
    """The user's callbacks and the default ones; those that save last, since they save the others' state.

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


def with_own_callbacks(callbacks: list[Callback], module: TrainModule) -> list[Callback]:
    """The Trainer's callbacks with those of `configure_callbacks`, which replace the ones of the same type.

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


def start_loggers(run: Session, module: TrainModule, datamodule: DataModule | None) -> None:
    """Choose the run folder, where anything will be written, and open the loggers in it."""
    trainer = run.trainer
    if trainer.loggers or trainer.checkpoint_callback is not None:
        folder = trainer.run_folder.choose(run)
        for logger in trainer.loggers:
            logger.start(folder, trainer.is_global_zero)
    params: dict[str, Any] = {}
    for owner in (datamodule, module):
        if owner is not None and owner._log_hyperparams:
            params.update(owner.hparams_initial)
    if params and run.fn == "fit":
        for logger in trainer.loggers:
            logger.log_hyperparams(params)
