"""Find out whether a run still goes on, and how and why it ended."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.health.run_status import FAILURES, PROGRESS, read_status
from instep.health.run_status import NAME as STATUS
from instep.utils.process_id import is_gone, state_of
from instep.utils.untrusted_files import LEASE_BYTES, clean, parse_object, read_regular

SILENT_S = 60.0  # seconds after which a run counts as dead; a lease is renewed every 5 s, and clocks of hosts differ
MOST_RANKS = 1000
STATES = ("starting", "running", "finished", "failed", "dead", "hung", "preempted", "interrupted", "unknown")
_BY_RANK = re.compile(r"rank (\d{1,7})(?: \(host [^)]*\))?: (.*)", re.DOTALL)


@dataclass(frozen=True)
class RunStatus:
    """State of a run, from its `status.json` and lease.

    Args:
        state: "starting", "running", "finished", "failed", "preempted", "interrupted", "hung", "dead" (it stopped
            without saying why: killed, or the machine went down), or "unknown" (a logger's folder without a
            `status.json`).
        cause: why the run ended, or why it counts as dead; "" if there is no reason.
        by_rank: message of each rank that failed, in one line; the rank that caused the failure comes first.
        step: last recorded number of optimizer steps; None if unknown.
        epoch: last recorded epoch; None if unknown.
        said: content of `status.json`: exit_code, signal, run_id, host, pid, checkpoint, command, cwd, started,
            summary, ...
        progress: content of `progress.json`: time, stage, phase, batch, batches, max_steps, steps_per_s, metrics, ...
        failures: content of `failures/rank-<n>.json`: rank, host, pid, step, batch, phase, how, message, traceback,
            cause, ...
    """

    state: str = "unknown"
    cause: str = ""
    by_rank: dict[int, str] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    said: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)


def look(folder: Path) -> RunStatus:
    """Read the state of a run from its folder; the state is "unknown" if it cannot be read."""
    content = read_status(folder) if own(folder / STATUS, folder) else None
    if content is None:
        return RunStatus(cause="status.json cannot be read" if os.path.lexists(folder / STATUS) else "")
    content, progress, failures = _tidy(content), _tidy(_object(folder / PROGRESS, folder)), _failures(folder)
    word, cause = _text(content, "status"), _text(content, "error") or _text(content, "why")
    state = "finished" if word == "done" else word if word in STATES else "unknown"
    if state in ("running", "starting") and (silent := _silence(folder, content)):
        state, cause = "dead", silent
    by_rank = {one["rank"]: ": ".join(filter(None, (_text(one, "how"), _text(one, "message")))) for one in failures}
    found = _BY_RANK.fullmatch(cause)
    if not by_rank and found:
        by_rank[int(found[1])] = found[2]
    step, epoch = (
        max((number for of in (content, progress) if (number := _count(of, key)) is not None), default=None)
        for key in ("global_step", "epoch")
    )
    return RunStatus(state, cause, by_rank, step, epoch, content, progress, failures)


def _failures(folder: Path) -> list[dict[str, Any]]:
    """Read the reports of failed ranks: the cause, then other ranks' own errors, then errors that follow from these."""
    try:
        names = sorted(os.listdir(folder / FAILURES))[:MOST_RANKS]
    except OSError:
        return []
    found = [_tidy(_object(folder / FAILURES / name, folder)) for name in names if name.endswith(".json")]
    found = [failure for failure in found if _count(failure, "rank") is not None]
    return sorted(found, key=lambda one: (one.get("cause") is not True, one.get("remote") is True, one["rank"]))


def _lease(folder: Path) -> tuple[dict[str, Any], float]:
    """Read the newest lease of a run's checkpoints, and the time when it was renewed; ({}, 0.0) if there is none."""
    path = max((folder / "checkpoints").glob(".lease-*"), key=lambda path: path.name, default=None)
    if path is not None:
        with suppress(OSError):
            return _object(path, folder), path.stat().st_mtime
    return {}, 0.0


def _silence(folder: Path, said: dict[str, Any]) -> str:
    """Return why a run counts as dead although its status says "running"; "" if it is alive."""
    lease, beat = _lease(folder)
    if lease.get("run_id") != said.get("run_id") or lease.get("released"):
        lease = {}  # the lease belongs to an earlier run, or its run has given it back
    pid, host = _count(said, "pid"), _text(said, "host")
    gone = is_gone(str(said.get("process") or lease.get("owner")))
    if gone is None and not lease and host == socket.gethostname() and pid:
        gone = state_of(pid) in ("", "Z", "X")
    if gone:
        return f"its main process (host {host}, pid {pid}) is gone: killed, out of memory, or the machine went down"
    with suppress(OSError):
        beat = max(beat if lease else 0.0, (folder / PROGRESS).stat().st_mtime)
    silent_s = time.time() - beat
    if gone is None and beat and silent_s > SILENT_S:
        return f"no sign of life from host {host}, pid {pid} for {silent_s:,.0f} s"
    return ""


def own(path: Path, folder: Path) -> bool:
    """Return True if a path below a run folder is really inside it: no part of the path is a link."""
    while path not in (folder, path.parent):
        if os.path.islink(path):
            return False
        path = path.parent
    return True


def _object(path: Path, folder: Path) -> dict[str, Any]:
    try:
        return parse_object(read_regular(path, LEASE_BYTES)) if own(path, folder) else {}
    except (OSError, ValueError):
        return {}


def _tidy(value: Any) -> Any:
    """Remove a terminal's control characters from the texts in a JSON value."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _tidy(inner) for key, inner in value.items()}
    return [_tidy(inner) for inner in value] if isinstance(value, list) else value


def _text(content: dict[str, Any], key: str) -> str:
    value = content.get(key)
    return value if isinstance(value, str) else ""


def _count(content: dict[str, Any], key: str) -> int | None:
    value = content.get(key)
    return value if type(value) is int and abs(value) < 2**63 else None
