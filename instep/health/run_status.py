"""`status.json` in a run folder: how a run ended, also if its main process could not write it.

The main process writes it. After the ranks have ended, the agent adds what the main process did not know or could not
write: that it was killed or aborted, and which rank's error broke the connection. Beside it `failures/rank-<n>.json`
has, for each rank that failed, its error and what it was doing: written by the rank itself, by the agent for one that
was killed, and by the report of a hang. Without an agent the main process sees only that a rank's connection breaks,
and finds the cause in these files. `progress.json` says how far a run was, also if it was killed (`progress_file`).
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
_MOST_CHARACTERS = 4000  # most characters of an error's text; each takes 12 bytes at most, and readers read LEASE_BYTES
_SHORT = 300
_TRACEBACK = "Traceback (most recent call last):"
_FROM_WORKER = f"Original {_TRACEBACK}"
_OF_A_RANK = re.compile(r"rank-[0-9]+\.json")


def is_bookkeeping(name: str) -> bool:
    """Return whether a file of a run folder is written by this module, or by `streams.ledger`."""
    return name == _SPARE or name.startswith((NAME, PROGRESS, "samples")) or _OF_A_RANK.match(name) is not None


def begin_status(folder: Path, content: dict[str, Any]) -> None:
    """Write that a run begins, delete what an earlier run left, and reserve disk space for the final status."""
    shutil.rmtree(folder / FAILURES, ignore_errors=True)
    (folder / PROGRESS).unlink(missing_ok=True)
    write_status(folder, content)
    with contextlib.suppress(OSError):  # the disk is already full: the first save will report it
        (folder / _SPARE).write_bytes(bytes(LEASE_BYTES))


def end_status(folder: Path, content: dict[str, Any]) -> None:
    """Write how a run ended; if the disk is full, write into the reserved space."""
    try:
        write_status(folder, content)
    except OSError as error:
        if error.errno not in _FULL or not _use_spare(folder / _SPARE, _json(content)):
            raise
        os.replace(folder / _SPARE, folder / NAME)
    (folder / _SPARE).unlink(missing_ok=True)


def write_status(folder: Path, content: dict[str, Any]) -> None:
    """Replace the file in one step."""
    replace(folder / NAME, _json(content))


def _json(content: dict[str, Any]) -> bytes:
    """Return the content as JSON, with its error cut to the length that a reader reads."""
    for key in ("error", "message", "traceback"):
        text = content.get(key)
        if text is not None and len(text) > _MOST_CHARACTERS:
            # The important part of a traceback is its end, that of an error its beginning.
            part = f"... {text[-_MOST_CHARACTERS:]}" if key == "traceback" else f"{text[:_MOST_CHARACTERS]} ..."
            content = content | {key: f"{part} ({len(text):,} characters)"}
    return (json.dumps(content, indent=2) + "\n").encode()


def in_short(text: str) -> str:
    """Return the beginning of an error's first line, for a place that links to the whole text.

    For an error that a loader's worker raised, it is the line of the worker's error, without the traceback that torch
    adds.
    """
    line, _, rest = text.strip().partition("\n")
    if rest.startswith(_FROM_WORKER):
        trace = rest.rpartition(_TRACEBACK)[2].split("\n")[1:]
        line = next((found for found in trace if found.strip() and not found.startswith(" ")), line)
    return line if len(line) <= _SHORT else f"{line[:_SHORT]} ..."


def why_of(content: dict[str, Any], error: str) -> dict[str, Any]:
    """Return the parts of a status that give the reason for an error in short, with its summary."""
    why, summary = in_short(error), content.get("summary")
    return {"why": why, "summary": {**summary, "why": why} if isinstance(summary, dict) else summary}


def _use_spare(spare: Path, data: bytes) -> bool:
    try:
        # The spare file's blocks are already allocated, and the write does not free them.
        with open(spare, "r+b") as file:
            file.write(data)
            file.truncate()
    except OSError:
        return False
    return True


def read_status(folder: Path) -> dict[str, Any] | None:
    """Read a run's status; None if there is none, or it cannot be read."""
    return _read(folder / NAME)


def read_step(folder: Path, run_id: str) -> int:
    """Return the optimizer step that a run has reached, as far as its folder says; else 0."""
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
    """Write what a failing rank was doing, and its error, if they can be written.

    Args:
        folder: the run folder.
        rank: the rank.
        facts: `host, pid, step, batch, phase, how, message, traceback, remote`, as far as they are known.
    """
    content = {"rank": rank, "time": time.time(), "cause": False, **facts}
    # The path is on another disk than the main process's, or the disk is full: the error is printed anyway.
    with contextlib.suppress(OSError):
        (folder / FAILURES).mkdir(exist_ok=True)
        replace(folder / FAILURES / f"rank-{rank}.json", _json(content))


def read_failures(folder: Path) -> list[dict[str, Any]]:
    """Read the ranks that failed: first the cause if one is named, then by time."""
    found = [_read(path) for path in (folder / FAILURES).glob("rank-*.json") if _OF_A_RANK.fullmatch(path.name)]
    known = [one for one in found if one is not None and isinstance(one.get("rank"), int)]
    return sorted(known, key=lambda one: (not one.get("cause"), bool(one.get("remote")), _number(one.get("time"))))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def find_failure(folder: Path) -> str:
    """Find the first error that another rank has written, with its rank; empty if there is none."""
    own = [one for one in read_failures(folder) if one["rank"] and not one.get("remote") and one.get("message")]
    return f"rank {own[0]['rank']}: {own[0]['message']}" if own else ""


def name_cause(folder: Path, pid: int, ends: Iterable[tuple[int, dict[str, Any], bool]]) -> None:
    """Complete the ranks' files from the agent: add killed ranks, and mark the cause.

    Args:
        folder: the run folder.
        pid: the main process's; the folder may be another run's by now.
        ends: for each rank that ended badly its number, what the agent knows of it, and whether it is the cause.
    """
    if (read_status(folder) or {}).get("pid") != pid:
        return
    for rank, facts, cause in ends:
        left = _read(folder / FAILURES / f"rank-{rank}.json") or {}
        leave_failure(folder, rank, {**facts, **left, "cause": cause})


# ---- what to do next


def how_to_go_on(status: dict[str, Any]) -> str:
    """Return a shell command by which an unfinished run continues; empty for a finished or an old one.

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
    """Write the cause from the agent, if the ranks have ended badly and the main process could not write it.

    An error of its own that the main process wrote stays, and so does a status of done, preempted, interrupted or hung.

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
        content |= {"ended": time.time(), **why_of(content, error)}
        end_status(folder, content)
