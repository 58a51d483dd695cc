"""Logger and progress bar for several ranks. The main process alone writes a line, or each rank writes one in order."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from instep.distributed import wait_for_everyone
from instep.errors import SettingError, one_of
from instep.state import ProcessEnvironment, process, read_environment
from instep.utils.imports import require

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_MOST_TEXTS = 1000


def known_place() -> tuple[ProcessEnvironment, bool]:
    """Return this process's `ProcessEnvironment` (rank, world size ...), and whether a process state exists.

    If none exists, the values are read from the launcher's environment variables, and no state is created.
    """
    joined = process.is_held()
    return process.held().environment if joined else read_environment(), joined


class RankLogger(logging.LoggerAdapter):
    """Python's logger with two more arguments in every call, `main_process_only` and `in_order`.

    With `main_process_only=True`, the default, only rank 0 logs. With False all ranks log, and each line begins with
    the rank. With `in_order=True` all ranks log one after the other. A call with `in_order=True` is a collective, even
    if its level is not logged.

    Before the process state exists, the rank comes from the launcher's environment variables, and with `in_order` ranks
    do not wait for each other.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: dict[str, None] = {}

    def log(
        self,
        level: int,
        msg: Any,
        *args: Any,
        main_process_only: bool = True,
        in_order: bool = False,
        stacklevel: int = 2,
        **kwargs: Any,
    ) -> None:
        """Log as Python's logger does.

        Args:
            level: a number of `logging`.
            msg: the text, with placeholders for `args`.
            args: values of the placeholders.
            main_process_only: whether only rank 0 logs.
            in_order: whether all ranks log, in the order of their ranks.
            stacklevel: stack frame that the line is reported from: 1 is this method, 2 is its caller.
            kwargs: `exc_info`, `extra`, `stack_info`.
        """
        place, joined = known_place()
        rank, world_size = place.rank, place.world_size
        shown = self.isEnabledFor(level) and (in_order or not main_process_only or rank == 0)
        if shown and world_size > 1 and (in_order or not main_process_only):
            msg = f"[RANK {rank}] {msg}"
        for turn in range(world_size) if in_order and joined else (rank,):
            if shown and turn == rank:
                self.logger.log(level, msg, *args, stacklevel=stacklevel, **kwargs)
            if in_order and joined:
                wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log a warning, unless this rank has already logged the same text with this method of this object.

        Only a thousand different texts are remembered, and the text that was logged first is forgotten first.
        """
        text = str(msg) % args if args else str(msg)
        if text not in self._warned:
            self._warned[text] = None
            if len(self._warned) > _MOST_TEXTS:
                del self._warned[next(iter(self._warned))]
            self.log(logging.WARNING, msg, *args, stacklevel=3, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a logger whose calls take `main_process_only` and `in_order`.

    Only the logger of this name is changed. The program itself must set handlers and the level of the root
    (`logging.basicConfig`).

    Args:
        name: as in `logging.getLogger`; usually `__name__`.
        log_level: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL"; None keeps the logger's level.

    Raises:
        SettingError: the level is unknown.

    Example:
        >>> logger = get_logger(__name__, log_level="INFO")
        >>> logger.info("from the main process")
        >>> logger.info("from every rank, in turn", in_order=True)
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        if not isinstance(log_level, str) or log_level.upper() not in _LEVELS:
            raise one_of("log_level", log_level, _LEVELS)
        logger.setLevel(log_level.upper())
    return RankLogger(logger)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Make a `tqdm.auto` bar that is shown only by the first process of every node.

    Args:
        args: arguments of tqdm, beginning with the iterable. `kwargs` are tqdm's too.
        main_process_only: whether only the first process of a node shows the bar; with False every process does.

    Raises:
        MissingPackageError: tqdm is not installed.
        SettingError: the first argument is a bool: pass `main_process_only` by name.

    Example:
        >>> sum(tqdm(range(3), disable=True))
        3
    """
    if args and isinstance(args[0], bool):
        raise SettingError(
            "tqdm(True, ...) is not taken: main_process_only is given by name", field="main_process_only"
        )
    bar = require("tqdm.auto", extra=None, purpose="instep.accelerator.tqdm").tqdm
    if main_process_only and known_place()[0].local_rank != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
