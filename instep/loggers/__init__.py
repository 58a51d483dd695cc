"""Loggers: one file each over `Logger`. A name is loaded when first used; tensorboard and wandb when they start."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instep.loggers.base import Logger

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'instep.loggers' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"instep.loggers.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
