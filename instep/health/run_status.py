"""`status.json` in a run folder: how a run ended, also where its main process could not say so.

The main process writes it. What it does not know, or cannot write any more, the agent adds once the ranks have ended:
that it was killed or aborted, and which rank's error the broken connection comes of. Where there is no agent a rank
that fails leaves its error in the run folder for the main process, which sees that rank's connection break later.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from instep.errors import EXIT_FAILED
from instep.health.error_report import is_remote
from instep.utils.atomic import replace
from instep.utils.untrusted_files import LEASE_BYTES, parse_object, read_regular

NAME = "status.json"
_SPARE = ".status-spare"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_CHARACTERS = 4000  # of an error: each has 12 bytes at most, and readers take LEASE_BYTES of all
_FAILED = ".failed-rank-{}.json"


def is_bookkeeping(name: str) -> bool:
    """Tell whether a file of a run folder is one of those written here."""
    return name == _SPARE or name.startswith((NAME, ".failed-rank-"))


def begin_status(folder: Path, content: dict[str, Any]) -> None:
    """Say that a run begins, forget what is left of an earlier one, and keep room for how it ends."""
    for left in folder.glob(_FAILED.format("*")):
        left.unlink(missing_ok=True)
    write_status(folder, content)
    with contextlib.suppress(OSError):  # the disk is full already: the first save says so
        (folder / _SPARE).write_bytes(bytes(LEASE_BYTES))


def end_status(folder: Path, content: dict[str, Any]) -> None:
    """Say how a run ended; on a full disk within the room that was kept."""
    try:
        write_status(folder, content)
    except OSError as error:
        if error.errno not in _FULL or not _use_spare(folder / _SPARE, _json(content)):
            raise
        os.replace(folder / _SPARE, folder / NAME)
    (folder / _SPARE).unlink(missing_ok=True)


def write_status(folder: Path, content: dict[str, Any]) -> None:
    """Replace the file at one instant."""
    replace(folder / NAME, _json(content))


def _json(content: dict[str, Any]) -> bytes:
    """Return the content with as much of its error as a reader of it takes."""
    error = content.get("error")
    if error is not None and len(error) > _MOST_CHARACTERS:
        content = content | {"error": f"{error[:_MOST_CHARACTERS]} ... ({len(error):,} characters)"}
    return (json.dumps(content, indent=2) + "\n").encode()


def _use_spare(spare: Path, data: bytes) -> bool:
    try:
        with open(spare, "r+b") as file:  # its blocks are there already, and are not freed before they are written
            file.write(data)
            file.truncate()
    except OSError:
        return False
    return True


def read_status(folder: Path) -> dict[str, Any] | None:
    """Read a run's status; None where there is none that can be read."""
    return _read(folder / NAME)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return parse_object(read_regular(path, LEASE_BYTES))
    except (OSError, ValueError):
        return None


def leave_failure(folder: Path, rank: int, error: str) -> None:
    """Leave the error of a rank that fails for the main process, if it can be left."""
    with contextlib.suppress(OSError):  # another disk than the main process's, or a full one: the error is printed
        replace(folder / _FAILED.format(rank), _json({"rank": rank, "error": error, "time_ns": time.time_ns()}))


def find_failure(folder: Path) -> str:
    """Find the first error that another rank has left, with its rank; empty where there is none."""
    found: list[tuple[int, str]] = []
    for path in folder.glob(_FAILED.format("*")):
        with contextlib.suppress(KeyError):  # no rank has written it
            if left := _read(path):
                found.append((left["time_ns"], f"rank {left['rank']}: {left['error']}"))
        path.unlink(missing_ok=True)
    return min(found)[1] if found else ""


def finish_status(folder: Path, pid: int, error: str, signal: str | None = None, own: bool = False) -> None:
    """Say the cause, from the agent, when the ranks have ended badly and the main process could not.

    What it has said of an error of its own, and that it was done, preempted, interrupted or hung, stays.

    Args:
        folder: the run folder.
        pid: the main process's; the file may be another's by now.
        error: why the ranks ended.
        signal: what asked them to end before.
        own: it is the main process that failed.
    """
    content = read_status(folder)
    if content is None or content.get("pid") != pid:
        return
    consequence = content["status"] == "failed" and not own and is_remote(str(content["error"]))
    if content["status"] == "running" or consequence:
        content |= {"status": "failed", "exit_code": EXIT_FAILED, "error": error, "signal": signal}
        end_status(folder, content)
