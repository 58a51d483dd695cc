"""Read and write `status.json` in a run folder, which says how a run ended, and `failures/`, with the ranks' errors.

The main process writes `status.json`. The agent is the process that starts the ranks of a node. After the ranks have
ended, the agent adds what the main process did not know or could not write: that the main process was killed or
aborted, or which rank's error broke the connection.

A file `failures/rank-<n>.json` says for a rank that failed what its error was and what it was doing. The rank writes
the file itself. The agent writes it for a killed rank, and the process that reports a hang writes it for a hanging
rank. Without an agent, the main process only sees that the connection to a rank broke, and finds the cause in these
files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instep.errors import EXIT_FAILED
from instep.health.error_report import is_remote
from instep.utils.atomic import replace
from instep.utils.untrusted_files import LEASE_BYTES, parse_object, read_regular

NAME = "status.json"
PROGRESS = "progress.json"
FAILURES = "failures"
_SPARE = ".status-spare"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_CHARACTERS = 4000  # limit for the text of an error: up to 12 bytes per character, within the file's LEASE_BYTES
_SHORT = 300
_TRACEBACK = "Traceback (most recent call last):"
_FROM_WORKER = f"Original {_TRACEBACK}"
_OF_A_RANK = re.compile(r"rank-[0-9]+\.json")


def is_bookkeeping(name: str) -> bool:
    """Return True if a file of this name belongs to this module, to `health.progress_file` or to `streams.ledger`."""
    return name == _SPARE or name.startswith((NAME, PROGRESS, "samples")) or _OF_A_RANK.match(name) is not None


def begin_status(folder: Path, content: dict[str, Any]) -> None:
    """Write the status of a run that begins, and reserve disk space for its last status.

    The failures and the progress of an earlier run in this folder are deleted.
    """
    shutil.rmtree(folder / FAILURES, ignore_errors=True)
    (folder / PROGRESS).unlink(missing_ok=True)
    write_status(folder, content)
    with contextlib.suppress(OSError):  # if the disk is full already, the first save of a checkpoint reports it
        (folder / _SPARE).write_bytes(bytes(LEASE_BYTES))


def end_status(folder: Path, content: dict[str, Any]) -> None:
    """Write the status of a run that has ended; if the disk is full, write into the reserved space."""
    try:
        write_status(folder, content)
    except OSError as error:
        if error.errno not in _FULL or not _use_spare(folder / _SPARE, _json(content)):
            raise
        os.replace(folder / _SPARE, folder / NAME)
    (folder / _SPARE).unlink(missing_ok=True)


def write_status(folder: Path, content: dict[str, Any]) -> None:
    """Replace `status.json` atomically."""
    replace(folder / NAME, _json(content))


def _json(content: dict[str, Any]) -> bytes:
    """Return the content as JSON, with long texts of an error cut, so that readers accept the size of the file."""
    for key in ("error", "message", "traceback"):
        text = content.get(key)
        if text is not None and len(text) > _MOST_CHARACTERS:
            # the end of a traceback and the beginning of a message are the important parts
            part = f"... {text[-_MOST_CHARACTERS:]}" if key == "traceback" else f"{text[:_MOST_CHARACTERS]} ..."
            content = content | {key: f"{part} ({len(text):,} characters)"}
    return (json.dumps(content, indent=2) + "\n").encode()


def in_short(text: str) -> str:
    """Return the beginning of the first line of an error message, for a place with little room, such as a table.

    If a worker of a loader raised the error, the line with the worker's error is used, without the traceback that torch
    puts before it.
    """
    line, _, rest = text.strip().partition("\n")
    if rest.startswith(_FROM_WORKER):
        trace = rest.rpartition(_TRACEBACK)[2].split("\n")[1:]
        line = next((found for found in trace if found.strip() and not found.startswith(" ")), line)
    return line if len(line) <= _SHORT else f"{line[:_SHORT]} ..."


def why_of(content: dict[str, Any], error: str) -> dict[str, Any]:
    """Return the entries of a status that say shortly why a run failed."""
    why, summary = in_short(error), content.get("summary")
    return {"why": why, "summary": {**summary, "why": why} if isinstance(summary, dict) else summary}


def _use_spare(spare: Path, data: bytes) -> bool:
    try:
        # The blocks of the spare file are already allocated, so overwriting them needs no free disk space.
        with open(spare, "r+b") as file:
            file.write(data)
            file.truncate()
    except OSError:
        return False
    return True


def read_status(folder: Path) -> dict[str, Any] | None:
    """Read the status of a run; return None if there is no status, or if it cannot be read."""
    return _read(folder / NAME)


def read_step(folder: Path, run_id: str) -> int:
    """Return how many optimizer steps a run has done, as its folder's files say; 0 if they are not of this run."""
    said, seen = _read(folder / NAME) or {}, _read(folder / PROGRESS) or {}
    steps = [each.get("global_step") for each in (said, seen)]
    return max((step for step in steps if type(step) is int), default=0) if said.get("run_id") == run_id else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return parse_object(read_regular(path, LEASE_BYTES))
    except (OSError, ValueError):
        return None


# ---- failures by rank


def leave_failure(folder: Path, rank: int, facts: dict[str, Any]) -> None:
    """Write `failures/rank-<n>.json` for a rank that fails; if it cannot be written, do nothing.

    Args:
        folder: the run folder.
        rank: number of the rank.
        facts: content of the file: those of `host`, `pid`, `step`, `batch`, `phase`, `how`, `message`, `traceback` and
            `remote` that are known.
    """
    content = {"rank": rank, "time": time.time(), "cause": False, **facts}
    # Writing fails if the folder does not exist on this machine, or if the disk is full. The rank's error is still
    # printed.
    with contextlib.suppress(OSError):
        (folder / FAILURES).mkdir(exist_ok=True)
        replace(folder / FAILURES / f"rank-{rank}.json", _json(content))


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """Read the files of failed ranks, in this order: the cause, own errors of ranks, errors that other ranks caused.

    Files of one kind are sorted by time.
    """
    found = [_read(path) for path in (folder / FAILURES).glob("rank-*.json") if _OF_A_RANK.fullmatch(path.name)]
    known = [one for one in found if one is not None and isinstance(one.get("rank"), int)]
    return sorted(known, key=lambda one: (not one.get("cause"), bool(one.get("remote")), _number(one.get("time"))))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def find_failure(folder: Path) -> str:
    """Return the first error that a rank other than 0 has caused itself, with the rank's number; "" if none."""
    own = [one for one in read_failures(folder) if one["rank"] and not one.get("remote") and one.get("message")]
    return f"rank {own[0]['rank']}: {own[0]['message']}" if own else ""


def name_cause(folder: Path, pid: int, ends: Iterable[tuple[int, dict[str, Any], bool]]) -> None:
    """Complete `failures/` after the ranks have ended: write files for killed ranks, and mark the cause.

    The agent calls this function.

    Args:
        folder: the run folder.
        pid: process id of the run's main process; if another run uses the folder now, nothing is written.
        ends: for each failed rank its number, the facts that the agent knows, and whether the rank is the cause.
    """
    if (read_status(folder) or {}).get("pid") != pid:
        return
    for rank, facts, cause in ends:
        left = _read(folder / FAILURES / f"rank-{rank}.json") or {}
        leave_failure(folder, rank, {**facts, **left, "cause": cause})


# ---- what to do next


def how_to_go_on(status: dict[str, Any]) -> str:
    """Return a shell command that continues an unfinished run; empty if the run is finished or no command is known.

    Example:
        >>> how_to_go_on({"status": "failed", "command": ["python", "train.py"], "resumes": True})
        'python train.py'
        >>> how_to_go_on({"status": "hung", "command": ["python", "train.py"], "checkpoint": "runs/step-00000008-1"})
        'python train.py  # with trainer.fit(..., ckpt_path="auto")'
        >>> how_to_go_on({"status": "failed", "command": ["instep", "fit", "-c", "a.yaml"], "checkpoint": "step-8-1"})
        'instep fit -c a.yaml --ckpt_path auto'
    """
    words = status.get("command")
    if status.get("status") == "done" or not isinstance(words, list) or not words:
        return ""
    line = shlex.join(str(word) for word in words)
    if status.get("resumes"):
        return line
    if not status.get("checkpoint"):
        return f"{line}  # from the start: it has no checkpoint"
    if "fit" in words[1:3] and os.path.basename(str(words[0])) == "instep":
        return f"{line} --ckpt_path auto"
    return f'{line}  # with trainer.fit(..., ckpt_path="auto")'


def finish_status(folder: Path, pid: int, error: str, signal: str | None = None, own: bool = False) -> None:
    """Write into `status.json` why the ranks failed, if the main process could not do so; the agent calls this.

    The status does not change if it is done, preempted, interrupted or hung, or if the main process has written an
    error of its own.

    Args:
        folder: the run folder.
        pid: process id of the run's main process; if another run uses the folder now, nothing is written.
        error: why the ranks failed.
        signal: name of the signal that asked the job to end before the failure; None if there was no signal.
        own: whether the main process is the rank that failed.
    """
    content = read_status(folder)
    if content is None or content.get("pid") != pid:
        return
    consequence = content["status"] == "failed" and not own and is_remote(str(content["error"]))
    if content["status"] == "running" or consequence:
        content |= {"status": "failed", "exit_code": EXIT_FAILED, "error": error, "signal": signal}
        content |= {"ended": time.time(), **why_of(content, error)}
        end_status(folder, content)
