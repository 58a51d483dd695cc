"""Describe a single run as rows and lines of text."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from instep.health.run_status import how_to_go_on, in_short
from instep.runs.folder import Run, tail
from instep.runs.metrics import Metrics
from instep.runs.status import RunStatus
from instep.utils.redact import HIDDEN

_FEW_LINES = 12  # maximum number of lines of a traceback that are shown
_TIMES = ("start", "data", "forward", "backward", "optimizer", "validation", "saving", "other")


def _doing(progress: dict[str, Any]) -> str:
    """Describe what a run was doing, according to its `progress.json`."""
    parts = [f"{progress[key]}" for key in ("stage",) if progress.get(key)]
    if progress.get("phase") not in (None, progress.get("stage")):
        parts.append(f"phase {progress['phase']}")
    for key, name, most in (
        ("epoch", "epoch", "max_epochs"),
        ("batch", "batch", "batches"),
        ("global_step", "step", "max_steps"),
    ):
        value, limit = progress.get(key), progress.get(most)
        if isinstance(value, int):
            value += key == "epoch"  # epochs are shown from 1, as in the progress bar
            parts.append(f"{name} {value:,}" + (f" of {limit:,}" if isinstance(limit, int) and limit > 0 else ""))
    speed = progress.get("steps_per_s")
    return ", ".join([*parts, *([f"{speed:.3g} steps/s"] if isinstance(speed, (int, float)) else [])])


def state_lines(status: RunStatus, ago: str) -> list[str]:
    """Describe why a run ended, and what it was or is doing.

    Args:
        status: status of the run.
        ago: how long ago the run's progress was written, as text.
    """
    below = any(failure.get("traceback") for failure in status.failures[:1])
    whole = not (below and "Traceback (most recent call last):" in status.cause)
    why = [f"why: {status.cause.strip() if whole else in_short(status.cause)}"] if status.cause else []
    done, step = _doing(status.progress), status.progress.get("global_step")
    if done and status.state != "finished":
        later = status.step is not None and isinstance(step, int) and status.step > step
        then = f"; then it came to step {status.step:,}" if later else ""
        return [*why, f"{'doing' if status.state == 'running' else 'was doing'}: {done}, {ago}{then}"]
    epoch = "" if status.epoch is None else f", epoch {status.epoch + 1:,}"
    return why if status.step is None else [*why, f"step {status.step:,}{epoch}"]


def end_of_log(run: Run, lines: int) -> list[str]:
    """Return the last lines of a run's newest log file, below a title; empty if there is no log."""
    newest = next(iter(run.logs()), None) if lines > 0 else None
    text = "" if newest is None else tail(newest, lines).rstrip("\n")
    return [f"\nend of {newest.relative_to(run.folder)}", text] if newest is not None and text else []


def failure_rows(status: RunStatus) -> list[tuple[Any, ...]]:
    """Return a row for each failed rank: rank, host, step, batch, phase, kind of failure, message.

    If it is known which rank caused the failure, this rank has the first row.
    """
    return [
        (
            f"{failure['rank']}{' (the cause)' if failure.get('cause') is True else ''}",
            *(failure.get(key) for key in ("host", "step", "batch", "phase", "how")),
            in_short(str(failure.get("message") or "")),
        )
        for failure in status.failures
    ]


def traceback_of(status: RunStatus) -> list[str]:
    """Return the end of the traceback of the first rank in `status.failures`, below a title; empty if there is none."""
    trace = str(status.failures[0].get("traceback") or "").rstrip().splitlines() if status.failures else []
    if not trace:
        return []
    shown = [*(["..."] if len(trace) > _FEW_LINES else []), *trace[-_FEW_LINES:]]
    return [f"\ntraceback of rank {status.failures[0]['rank']}", *(f"  {line}" for line in shown)]


def metric_rows(metrics: Metrics) -> list[tuple[str, ...]]:
    """Return for each metric: name, last value and its step, least, greatest, number of points, and first nan.

    The epoch, which loggers write among the metrics, is left out: loggers count it from 0, and a screen from 1.
    """
    return [
        (
            name,
            number(curve.last),
            f"{curve.last_step:.0f}",
            *("" if math.isnan(value) else number(value) for value in (curve.least, curve.greatest)),
            f"{curve.count:,}",
            "" if curve.first_bad is None else f"first nan at step {curve.first_bad:.0f}",
        )
        for name, curve in metrics.curves.items()
        if name != "epoch"
    ]


def number(value: float | None) -> str:
    """Format a metric's value with five digits; "" for None.

    Example:
        >>> number(0.123456789), number(None)
        ('0.12346', '')
    """
    return "" if value is None else f"{value:.5g}"


def time_shares(said: dict[str, Any]) -> str:
    """Format the shares of a run's time by kind of work; "" if its status does not have them."""
    summary = said.get("summary")
    times = summary.get("time_s") if isinstance(summary, dict) else None
    if not isinstance(times, dict):
        return ""
    known = {name: times[name] for name in _TIMES if isinstance(times.get(name), float) and times[name] < 1e12}
    whole = sum(known.values()) or 1.0
    parts = [f"{name} {value / whole:.0%}" for name, value in known.items() if value / whole >= 0.005]
    return f"{whole:,.0f} s: {', '.join(parts)}"


def lines_to_go_on(said: dict[str, Any]) -> list[str]:
    """Return the commands with which a run is continued, below a title; empty for a finished run."""
    line, cwd = how_to_go_on(said), said.get("cwd")
    if not line:
        return []
    change = [f"  cd {shlex.quote(cwd)}"] if isinstance(cwd, str) and Path(cwd) != Path.cwd() else []
    hidden = [f"  ({HIDDEN} stands for secrets, which are not kept)"] if HIDDEN in line else []
    return ["\nit goes on with", *change, f"  {line}", *hidden]
