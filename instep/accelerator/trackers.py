"""The experiment loggers of an Accelerator: the Trainer's, by name or as objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep import loggers
from instep.errors import SettingError, UsageError, one_of
from instep.loggers import Logger
from instep.utils.warn import warn_user

NAMES = {"csv": "CSVLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger"}


class Trackers:
    """Loggers of an Accelerator: `log_with`, `init_trackers`, `log` and `end_training` act on them.

    What is logged before `init` is kept and written then.

    Args:
        log_with: names, "all", `Logger` objects, or a list of these.
        is_main: whether this process writes.

    Raises:
        SettingError: a name is unknown, or given twice.
    """

    def __init__(self, log_with: str | Logger | Sequence[str | Logger] | None, is_main: bool) -> None:
        asked = [] if log_with is None else [log_with] if isinstance(log_with, (str, Logger)) else list(log_with)
        self._asked: dict[str, str | Logger] = {}
        for item in [name for one in asked for name in (NAMES if one == "all" else [one])]:
            if not isinstance(item, Logger) and item not in NAMES:
                raise one_of("log_with", item, ("all", *NAMES))
            if item in self._asked.values():
                raise SettingError(f"log_with has {item!r} twice; give each logger once", field="log_with", got=item)
            name = _name(item)
            same = sum(_name(other) == name for other in self._asked.values())
            self._asked[f"{name}-{same + 1}" if same else name] = item
        self._is_main = is_main
        self._started: dict[str, Logger] = {}
        self._kept: list[tuple[dict[str, Any], int | None]] = []
        self._step = 0
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
            UsageError: they run already.
            SettingError: `init_kwargs` is for a logger that `log_with` does not name.
        """
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
            if isinstance(item, str):
                key = "project" if item == "wandb" else "name"
                options = {key: project_name, **init_kwargs.get(item, {})}
                logger: Logger = getattr(loggers, NAMES[item])(**options)
            else:
                logger = item
            place = folder if _name(item) == "wandb" else folder / project_name  # W&B parts projects itself
            logger.start(place, is_main=self._is_main)
            self._started[name] = logger
            if config:
                logger.log_hyperparams(config)
        kept, self._kept = self._kept, []
        for values, step in kept:
            self.log(values, step)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Write numbers; without a step under the one after the last."""
        if not self._asked:
            if not self._warned:
                warn_user(
                    'accelerator.log() has nowhere to write to: give Accelerator(log_with="tensorboard"), or another '
                    "logger, and call init_trackers()"
                )
            self._warned = True
        elif not self._started:
            self._kept.append((dict(values), step))
        else:
            self._step = self._step + 1 if step is None else step
            for logger in self._started.values():
                logger.log_metrics(values, self._step)

    def get(self, name: str, unwrap: bool) -> Any:
        """Return a started logger, or what it writes with.

        Args:
            name: as in `log_with`; of a `Logger` object its kind ("csv") or class; of a second one of its kind with
                "-2" after it, and so on.
            unwrap: give the writer, such as TensorBoard's; on other ranks than the main one it does nothing.
        """
        if name not in self._started:
            known = ", ".join(self._started) or "none"
            raise UsageError(
                f"there is no tracker {name!r}; started are: {known}. Name it in log_with, then call init_trackers()."
            )
        logger = self._started[name]
        return logger.experiment if unwrap else logger  # pyright: ignore[reportAttributeAccessIssue]

    def finish(self) -> None:
        """Close the loggers."""
        if self._kept:
            warn_user(
                f"{len(self._kept)} records of accelerator.log() were never written: init_trackers() was not called"
            )
        started, self._started, self._kept = self._started, {}, []
        for logger in started.values():
            logger.finalize()


def _name(logger: str | Logger) -> str:
    if isinstance(logger, str):
        return logger
    kind = type(logger).__name__
    return next((name for name, known in NAMES.items() if known == kind), kind)
