"""What trackers did not take during a run is sent from the run's folder: `instep runs sync`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from instep.errors import InstepError, SettingError
from instep.loggers import logger_class, logger_names
from instep.loggers.backlog import read_note
from instep.loggers.base import Logger
from instep.loggers.delivery import in_short
from instep.utils.atomic import replace
from instep.utils.untrusted_files import open_regular

_STEM = re.compile(r"[A-Za-z_][A-Za-z0-9_]*?(?:-(?P<number>[0-9]{1,4}))?(?:-rank-(?P<rank>[0-9]{1,6}))?")
_TRIES = 3
_PAUSE_S = 2.0


class Sent(NamedTuple):
    """What became of a logger's backlog: how many records waited, how many do still, and why."""

    logger: str
    waited: int
    left: int
    reason: str


def sync(run: Path, timeout_s: float = 600.0) -> Iterator[Sent]:
    """Send what waits in a run folder, logger by logger, in the order it was logged.

    The file beside it that says which logger to use is read as data: only a registered logger is made, only by its own
    plain arguments, and only where the file belongs to the user who asks, since it says where records are sent with the
    user's credentials.

    Args:
        run: the run folder.
        timeout_s: how long one logger may take.

    Raises:
        SettingError: the logger is not known, or a file belongs to another user.
        InstepError: the run is still going on, or the logger cannot be opened.
    """
    folder = run / "loggers"
    for file in sorted(folder.glob("*.jsonl")):
        if file.name.endswith(".refused.jsonl") and file.with_name(file.name.replace(".refused", "")).exists():
            continue  # it is sent with the other one
        note = file.with_name(file.name.removesuffix(".jsonl").removesuffix(".refused") + ".json")
        yield _send(run, note, timeout_s)


def _send(run: Path, note: Path, timeout_s: float) -> Sent:
    backlog, refused = note.with_suffix(".jsonl"), note.with_suffix(".refused.jsonl")
    for file in (note, backlog, refused):
        if os.path.lexists(file) and hasattr(os, "getuid") and os.lstat(file).st_uid != os.getuid():
            raise SettingError(f"{file} belongs to another user: it says where records are sent with your credentials")
    content = read_note(note)
    kind = _class_of(str(content.get("logger")), note)
    _check_free(backlog, kind.__name__)
    if refused.exists():  # tried again, before the others
        with open_regular(refused) as file:
            first = file.readall()
        rest = b""
        if backlog.exists():
            with open_regular(backlog) as file:
                rest = file.readall()
        replace(backlog, first + rest)
        refused.unlink()
    given = content.get("arguments")
    known = {"name", "save_dir", *kind._SYNC}
    arguments = {name: value for name, value in given.items() if name in known} if isinstance(given, dict) else {}
    logger = kind(**arguments)
    match = _STEM.fullmatch(note.stem)
    number, rank = (int(match[key] or 0) for key in ("number", "rank")) if match is not None else (0, 0)
    logger.take_up(content.get("version"), max(0, number - 1), rank, str(content.get("status", "interrupted")))
    with BufferedReader(open_regular(backlog)) as lines:
        waited = sum(line.startswith(b"[") for line in lines)  # one that has arrived has lost its "["
    return _deliver(logger, run, waited, timeout_s)


def _class_of(text: str, note: Path) -> type[Logger]:
    for name in logger_names():
        with suppress(ImportError):
            kind = logger_class(name)
            if f"{kind.__module__}:{kind.__qualname__}" == text:
                return kind
    raise SettingError(
        f"{note} is of the logger {text!r}, which is not registered here: give --import with the module that calls "
        "register_logger, or install a package that offers it as an entry point of instep.loggers"
    )


def _check_free(backlog: Path, name: str) -> None:
    """Raise where a process that runs holds the backlog."""
    with suppress(ImportError, FileNotFoundError):
        import fcntl  # late: not on every platform

        with open_regular(backlog) as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InstepError(f"{backlog}: the run goes on, and its {name} sends this itself") from None


def _deliver(logger: Logger, run: Path, waited: int, timeout_s: float) -> Sent:
    end_s = time.monotonic() + timeout_s
    logger.start(run)
    delivery = logger._delivery
    assert delivery is not None
    for attempt in range(_TRIES):
        all_sent = delivery.flush(max(0.1, end_s - time.monotonic())) and delivery.is_begun
        if all_sent or time.monotonic() > end_s:
            break
        time.sleep(_PAUSE_S * (attempt + 1))
    left, error = len(delivery.backlog) if delivery.is_begun else waited, delivery.error
    logger.finalize(logger.status)
    reason = in_short(error) if error is not None else ""
    return Sent(type(logger).__name__, waited, left + delivery.refused, reason)
