"""Experiment loggers of an Accelerator: the Trainer's loggers, by name or as objects, and the user's trackers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from instep import loggers
from instep.errors import MissingPackageError, SettingError, UsageError, one_of
from instep.loggers import Logger
from instep.types import ReadOnly, Word
from instep.utils.checks import TEXT, is_int, wrong
from instep.utils.warn import warn_user

_MOST_KEPT = 10_000  # largest number of records that are kept before init_trackers() is called


class LoggerType(Word):
    """Names for `Accelerator(log_with=...)`; registered trackers have names too. Each member equals its string."""

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    CSV = "csv"
    DVCLIVE = "dvclive"
    JSONL = "jsonl"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


class GeneralTracker:
    """Base class of a tracker that gets all values of `accelerator.log`.

    To log numbers only, derive a class from `Logger` instead, which offers more. A subclass of GeneralTracker must have
    the attributes `name` and `requires_logging_directory`, and the property `tracker`, which is the object that the
    tracker writes with. Its methods run only on the main process, unless `main_process_only` is False.

    Raises:
        NotImplementedError: the subclass lacks one of the three attributes.

    Example:
        >>> class Printed(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "printed", False, None
        ...
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> Printed().log({"loss": 0.5}, step=3)
        3 {'loss': 0.5}

    Source:
        Names and meaning are those of Hugging Face Accelerate's GeneralTracker.
    """

    main_process_only = True
    if TYPE_CHECKING:
        name: Any
        requires_logging_directory: bool
        tracker: Any

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(f"{type(self).__name__} has no {', no '.join(missing)}: define it in the class")

    def start(self) -> None:
        """Open files or connections; called by `init_trackers`."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write hyperparameters."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write values; `kwargs` are the entries of `log_kwargs` for this tracker."""

    def finish(self) -> None:
        """Close the files or connections that `start` opened."""


LOGGER_TYPE_TO_CLASS: dict[str, type[Any]] = {}
"""Tracker classes that `register_tracker_class` has registered, by name."""


def register_tracker_class(tracker_class: type[Any]) -> None:
    """Register a class of trackers under its `name`, for `Accelerator(log_with=...)`.

    `init_trackers` makes an object of this class with the project's name, the logging folder (if
    `requires_logging_directory` is true), and its part of `init_kwargs`.

    Args:
        tracker_class: a subclass of `GeneralTracker`.

    Raises:
        SettingError: the class is not a subclass of `GeneralTracker`, or lacks `name` or `requires_logging_directory`.

    Example:
        >>> from instep.accelerator import Accelerator
        >>> class Console(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "console", False, None
        ...
        ...     def __init__(self, project_name):
        ...         super().__init__()
        ...
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> register_tracker_class(Console)
        >>> accelerator = Accelerator(cpu=True, log_with="console")
        >>> accelerator.init_trackers("digits")
        >>> accelerator.log({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
        >>> accelerator.end_training()
    """
    kind = tracker_class
    if not (isinstance(kind, type) and issubclass(kind, GeneralTracker)):
        raise SettingError(f"`tracker_class` must be a subclass of `GeneralTracker`; got {kind!r}", got=kind)
    for attribute in ("name", "requires_logging_directory"):
        if getattr(kind, attribute, None) in (None, ""):
            raise SettingError(f"{kind.__name__} has no `{attribute}`: define it in the class", field=attribute)
    name = str(kind.name)
    if name in LOGGER_TYPE_TO_CLASS or name in loggers.logger_names():
        warn_user(f"a tracker {name!r} is already registered, and {kind.__name__} takes its place")
    LOGGER_TYPE_TO_CLASS[name] = kind


LogWith: TypeAlias = "str | Logger | GeneralTracker | Sequence[str | Logger | GeneralTracker] | None"


class Trackers:
    """Loggers and trackers of an Accelerator, behind `log_with`, `init_trackers`, `log` and `end_training`.

    Values that are logged before `init` are kept, and written by `init`.

    Args:
        log_with: names, "all", `Logger` and `GeneralTracker` objects, or a list of these.
        is_main: whether this process writes.
        folder: folder of the loggers; None if it is not set.

    Raises:
        SettingError: a name is unknown, or given twice, or a tracker needs a folder.
    """

    def __init__(self, log_with: LogWith, is_main: bool, folder: str | None = None) -> None:
        alone = not isinstance(log_with, list | tuple | set)
        asked: list[Any] = [] if log_with is None else [log_with] if alone else list(log_with)  # pyright: ignore[reportArgumentType]
        self._asked: dict[str, str | Logger | GeneralTracker] = {}
        self._is_main = self._writes = is_main
        for item in [name for one in asked for name in (_installed() if one == "all" else [one])]:
            if not isinstance(item, (Logger, GeneralTracker)) and item not in LOGGER_TYPE_TO_CLASS:
                if item not in (names := loggers.logger_names()):
                    raise one_of("log_with", item, ("all", *names, *LOGGER_TYPE_TO_CLASS))
                loggers.logger_class(str(item)).check_installed()
            kind = LOGGER_TYPE_TO_CLASS.get(item) if isinstance(item, str) else item
            if folder is None and getattr(kind, "requires_logging_directory", False):
                raise SettingError(
                    f"Logging with `{item}` requires a `logging_dir`: give Accelerator(project_dir=...)",
                    field="project_dir",
                )
            self._writes |= not getattr(kind, "main_process_only", True) or getattr(kind, "_per_rank", False)
            if item in self._asked.values():
                raise SettingError(f"log_with has {item!r} twice; give each logger once", field="log_with", got=item)
            name = _name(item)
            same = sum(_name(other) == name for other in self._asked.values())
            self._asked[f"{name}-{same + 1}" if same else name] = item
        self._started: dict[str, Any] = {}
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=_MOST_KEPT)
        self.step = 0
        """Step of the last record; a state of the Accelerator holds it, so that a resumed program counts on."""
        self._warned = False

    def init(
        self,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]],
        folder: Path,
    ) -> None:
        """Make and start the loggers.

        Raises:
            UsageError: the loggers are already started.
            SettingError: `init_kwargs` is for a logger that `log_with` does not name.
        """
        TEXT("project_name", project_name)
        if self._started:
            raise UsageError(
                f"init_trackers() was called twice; {', '.join(self._started)} run already. Call end_training() before "
                "another run's."
            )
        unknown = set(init_kwargs) - {item for item in self._asked.values() if isinstance(item, str)}
        if unknown:
            raise SettingError(
                f"init_kwargs has {', '.join(sorted(unknown))}, which log_with does not name", field="init_kwargs"
            )
        for name, item in self._asked.items():
            if isinstance(item, GeneralTracker) or (isinstance(item, str) and item in LOGGER_TYPE_TO_CLASS):
                self._start_tracker(name, item, project_name, config, init_kwargs, folder)
                continue
            if isinstance(item, str):
                kind = loggers.logger_class(item)
                logger = kind(**{kind.project_argument: project_name, **init_kwargs.get(item, {})})
            else:
                logger = item
            # A logger whose `project_argument` is not "name", such as wandb, separates projects itself.
            place = folder / project_name if type(logger).project_argument == "name" else folder
            logger.delivery.start(place, is_main=self._is_main)
            self._started[name] = logger
            if config:
                logger.log_hyperparams(config)
        while self._kept:
            self.log(*self._kept.popleft())

    def _start_tracker(
        self,
        name: str,
        item: str | GeneralTracker,
        project_name: str,
        config: Mapping[str, Any] | None,
        init_kwargs: Mapping[str, Mapping[str, Any]],
        folder: Path,
    ) -> None:
        tracker: Any = item
        if isinstance(item, str):
            kind = LOGGER_TYPE_TO_CLASS[item]
            places = (os.fspath(folder),) if kind.requires_logging_directory else ()
            tracker = kind(project_name, *places, **init_kwargs.get(item, {}))
        self._started[name] = tracker
        if self._acts(tracker):
            tracker.start()
            if config:
                tracker.store_init_configuration(config)

    def _acts(self, tracker: GeneralTracker) -> bool:
        return self._is_main or not tracker.main_process_only

    started: ReadOnly[list[Any]] = ReadOnly(lambda t: list(t._started.values()), "The started loggers and trackers.")

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Log values. If `step` is None, it is one more than in the last call."""
        if not isinstance(values, Mapping):
            raise wrong("values", values, "numbers or texts by name, such as {'loss': 0.5}")
        if step is not None and not is_int(step):
            raise wrong("step", step, "a number of steps, or None")
        if not self._asked:
            if not self._warned:
                warn_user(
                    'accelerator.log() has nowhere to write to: give Accelerator(log_with="tensorboard"), or another '
                    "logger, and call init_trackers()"
                )
            self._warned = True
        elif not self._started and self._writes:  # scripts may call init_trackers() on the main process only
            if len(self._kept) == _MOST_KEPT and not self._warned:
                self._warned = True
                warn_user(
                    f"accelerator.log() keeps the last {_MOST_KEPT:,} records until init_trackers() is called, and has "
                    "dropped older ones: call it before the first step"
                )
            self._kept.append((dict(values), step, log_kwargs))
        else:
            self.step = self.step + 1 if step is None else int(step)
            for name, logger in self._started.items():
                more = (log_kwargs or {}).get(name, {})
                if not isinstance(logger, GeneralTracker):
                    self._log_to(name, logger, _flat(values), more)
                elif self._acts(logger):
                    logger.log(dict(values), step=self.step, **more)

    def _log_to(self, name: str, logger: Logger, values: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        if more:
            raise SettingError(
                f"log_kwargs={{{name!r}: ...}}: {type(logger).__name__} takes values and a step only. "
                f"accelerator.get_tracker({name!r}, unwrap=True) is what it writes with.",
                field="log_kwargs",
            )
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        if texts:
            logger.log_text(texts, step=self.step)
        if len(texts) < len(values):
            logger.log_metrics({key: value for key, value in values.items() if key not in texts}, self.step)

    def get(self, name: str, unwrap: bool) -> Any:
        """Return a started logger, or the object that it writes with.

        Args:
            name: name as in `log_with`; for a `Logger` object its kind ("csv") or the name of its class. The second
                logger of one kind has "-2" at the end, the third "-3", and so on.
            unwrap: whether to return the writer, such as TensorBoard's. On ranks other than the main one it is an
                object whose methods do nothing.
        """
        if not self._started and not self._is_main:  # scripts may call init_trackers() on the main process only
            return loggers.base.NoExperiment()
        if name not in self._started:
            known = ", ".join(self._started) or "none"
            raise UsageError(
                f"there is no tracker {name!r}; started are: {known}. Name it in log_with, then call init_trackers()."
            )
        logger = self._started[name]
        writer = "tracker" if isinstance(logger, GeneralTracker) else "experiment"
        return getattr(logger, writer) if unwrap else logger

    def finish(self) -> None:
        """Close the loggers and trackers."""
        if self._kept:
            warn_user(
                f"{len(self._kept)} records of accelerator.log() were never written: init_trackers() was not called"
            )
            self._kept.clear()
        started, self._started = self._started, {}
        for logger in started.values():
            if not isinstance(logger, GeneralTracker):
                logger.finalize()
            elif self._acts(logger):
                logger.finish()


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten `{"loss": {"a": 1}}` to `{"loss/a": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name}/") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat


def _name(logger: str | Logger | GeneralTracker) -> str:
    if isinstance(logger, str):
        return str(getattr(logger, "value", logger))
    if isinstance(logger, GeneralTracker):
        return str(logger.name)
    return loggers.name_of(type(logger))


def _installed() -> list[str]:
    """List the trackers whose packages are installed."""
    found = []
    for name in loggers.logger_names():
        with suppress(MissingPackageError):
            loggers.logger_class(name).check_installed()
            found.append(name)
    return found
