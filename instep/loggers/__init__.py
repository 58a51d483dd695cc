"""The loggers of instep, each in a file of its own that is imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.errors import SettingError, one_of
from instep.loggers.base import Logger, takes
from instep.utils.imports import loads
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.loggers.aim import AimLogger as AimLogger
    from instep.loggers.clearml import ClearMLLogger as ClearMLLogger
    from instep.loggers.comet import CometLogger as CometLogger
    from instep.loggers.csv import CSVLogger as CSVLogger
    from instep.loggers.dvclive import DVCLiveLogger as DVCLiveLogger
    from instep.loggers.json_lines import JSONLinesLogger as JSONLinesLogger
    from instep.loggers.mlflow import MLFlowLogger as MLFlowLogger
    from instep.loggers.swanlab import SwanLabLogger as SwanLabLogger
    from instep.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from instep.loggers.trackio import TrackioLogger as TrackioLogger
    from instep.loggers.wandb import WandbLogger as WandbLogger

_names, _load, __dir__ = loads(__name__)

__all__ = ["Logger", "register_logger", *_names]  # pyright: ignore[reportUnsupportedDunderAll]

NAMES: dict[str, str | type[Logger]] = {
    "aim": "AimLogger",
    "clearml": "ClearMLLogger",
    "comet_ml": "CometLogger",
    "csv": "CSVLogger",
    "dvclive": "DVCLiveLogger",
    "jsonl": "JSONLinesLogger",
    "mlflow": "MLFlowLogger",
    "swanlab": "SwanLabLogger",
    "tensorboard": "TensorBoardLogger",
    "trackio": "TrackioLogger",
    "wandb": "WandbLogger",
}
"""Names that `Trainer(logger=...)` and `Accelerator(log_with=...)` accept, besides those that entry points offer."""

GROUP = "instep.loggers"
"""Group of entry points with which installed packages offer loggers."""


def __getattr__(name: str) -> Any:
    return _load(name)


def register_logger(name: str, logger: type[Logger]) -> None:
    """Register a logger class under a name for `Trainer(logger=...)`, `Accelerator(log_with=...)` and YAML files.

    An installed package can register its logger without this call, by an entry point of the group `instep.loggers`.

    Args:
        name: name for the class. If the name is registered already, it gets the new class, with a warning.
        logger: subclass of `Logger`.

    Raises:
        SettingError: `logger` is not a subclass of `Logger`.

    Example:
        >>> from instep import Trainer
        >>> class ListLogger(Logger):
        ...     pass
        >>> register_logger("list", ListLogger)
        >>> Trainer(logger="list").loggers[0].__class__.__name__
        'ListLogger'
    """
    if not (isinstance(logger, type) and issubclass(logger, Logger)):
        raise SettingError(f"register_logger({name!r}): got {logger!r}, and a subclass of Logger is wanted", got=logger)
    if name in NAMES and logger_class(name) is not logger:
        warn_user(f"the logger {name!r} is registered already, and {logger.__name__} takes its place")
    NAMES[name] = logger


def logger_names() -> list[str]:
    """Return the names of all registered loggers, including those of other packages."""
    from importlib.metadata import entry_points  # imported late: takes 10 ms, and only lists of names need it

    return [*NAMES, *(point.name for point in entry_points(group=GROUP) if point.name not in NAMES)]


def logger_class(name: str) -> type[Logger]:
    """Return the logger class for a name.

    Raises:
        SettingError: no logger is registered under the name.
    """
    known = name if name in _names else NAMES.get(name, NAMES.get(name.lower()))
    if known is None:
        from importlib.metadata import entry_points  # imported late: takes 10 ms, and is needed only for unknown names

        found = next(iter(entry_points(group=GROUP, name=name)), None)
        if found is None:
            raise one_of("logger", name, logger_names())
        known = found.load()
    return _load(known) if isinstance(known, str) else known


def name_of(logger: type[Logger]) -> str:
    """Return the name under which a logger class is registered, or the class's own name if it is not registered."""
    return next((name for name, known in NAMES.items() if known in (logger, logger.__name__)), logger.__name__)


def that_take(kind: str) -> list[str]:
    """Return the loggers of instep that can log a kind of value, such as "image", without importing a tracker."""
    return [name for name in _names if takes(_load(name), kind)]
