"""Loggers: one file each over `Logger`. A name is loaded when first used; tensorboard and wandb when they start."""

from typing import TYPE_CHECKING

from instep.loggers.base import Logger
from instep.utils.imports import loads

_HOME = {
    "CSVLogger": "csv",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}

if TYPE_CHECKING:
    from instep.loggers.csv import CSVLogger as CSVLogger
    from instep.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from instep.loggers.wandb import WandbLogger as WandbLogger

__all__ = ["Logger", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
