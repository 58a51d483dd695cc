"""Show a run: what it is doing or was doing at its end, the cause by rank, its last metrics, and how it goes on.

Of a folder with several runs the newest is shown. `--verify` compares every byte of the checkpoints with its checksum.

Examples:
  instep runs show instep_runs/version_0
  instep runs show .                                       the newest run below this folder
  instep runs show instep_runs/version_0 --verify --log 200
  instep runs show . --json | jq -r .go_on
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from instep.cli import output
from instep.cli.runs.chosen import ends, find, finite, number, settings
from instep.cli.runs.ls import describe
from instep.health.run_status import how_to_go_on, in_short
from instep.runs import Metrics, Run
from instep.runs.folder import tail
from instep.utils.redact import HIDDEN

_BAD = ("failed", "hung", "dead", "interrupted", "preempted")
_FEW, _FEW_LINES = 20, 12  # metrics, lines of a traceback; --json has all
_TIMES = ("start", "data", "forward", "backward", "optimizer", "validation", "saving", "other")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("path", metavar="RUN", nargs="?", default=".", help="a run, or a folder of runs (default: .)")
    parser.add_argument("--verify", action="store_true", help="read every byte of the checkpoints")
    parser.add_argument(
        "--log", type=int, metavar="LINES", help="lines of the newest log to show (default: 20 where it went wrong)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print all that is known of a run."""
    runs = find([args.path])
    one = runs[0]
    if len(runs) > 1:
        sys.stderr.write(f"instep: the newest of {len(runs):,} runs\n")
    metrics, checkpoints = one.metrics(None, 100), one.checkpoints(args.verify)
    if args.json:
        output.say_json(
            {
                **describe(one),
                "said": one.status.said,
                "progress": one.status.progress,
                "failures": one.status.failures,
                "go_on": how_to_go_on(one.status.said),
                "metrics": {name: ends(curve) for name, curve in metrics.curves.items()},
                "checkpoints": checkpoints,
                "hparams": one.hparams,
                "reports": [str(path) for path in one.reports()],
                "logs": [str(path) for path in one.logs()],
                "problems": [*one.problems, *metrics.problems],
            }
        )
        return 0
    _print_state(one)
    _print_failures(one)
    _print_metrics(one, metrics)
    _print_times(one)
    _print_checkpoints(checkpoints)
    output.tree("hyperparameters", settings(one))
    _print_log(one, args.log)
    if one.status.state in _BAD:  # last, where the eye is
        _print_go_on(one)
    return 0


def _print_state(one: Run) -> None:
    status, said = one.status, one.status.said
    output.say(f"{one.folder}: {status.state}")
    if status.cause:
        below = any(failure.get("traceback") for failure in status.failures[:1])
        whole = not (below and "Traceback (most recent call last):" in status.cause)
        output.say(f"why: {status.cause.strip() if whole else in_short(status.cause)}")
    done = "" if status.state == "finished" else _doing(status.progress)
    if done:
        seen = f", {_ago(status.progress.get('time'))}"
        step = status.progress.get("global_step")
        if status.step is not None and isinstance(step, int) and status.step > step:
            seen += f"; then it came to step {status.step:,}"
        output.say(f"{'doing' if status.state == 'running' else 'was doing'}: {done}{seen}")
    elif status.step is not None:
        epoch = "" if status.epoch is None else f", epoch {status.epoch + 1:,}"
        output.say(f"step {status.step:,}{epoch}")
    where = [f"{key} {said[key]}" for key in ("host", "pid", "world_size", "strategy", "device") if said.get(key)]
    times = [f"{name} {_ago(said.get(key))}" for name, key in (("started", "started"), ("ended", "ended"))]
    facts = [*where, *(text for text in times if not text.endswith(" "))]
    if facts:
        output.say(", ".join(facts))
    for problem in one.problems:
        output.say(f"cannot be read: {problem}")


def _doing(progress: dict[str, Any]) -> str:
    """Say in words where a run was, by its `progress.json`."""
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
            value += key == "epoch"  # from 1, as on the screen
            parts.append(f"{name} {value:,}" + (f" of {limit:,}" if isinstance(limit, int) and limit > 0 else ""))
    speed = progress.get("steps_per_s")
    return ", ".join([*parts, *([f"{speed:.3g} steps/s"] if isinstance(speed, (int, float)) else [])])


def _ago(seconds: Any) -> str:
    try:
        return output.age(datetime.fromtimestamp(seconds, timezone.utc).isoformat())
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _print_failures(one: Run) -> None:
    status = one.status
    if status.failures:
        output.say()
        rows = [
            (
                f"{failure['rank']}{' (the cause)' if failure.get('cause') is True else ''}",
                *(failure.get(key) for key in ("host", "step", "batch", "phase", "how")),
                in_short(str(failure.get("message") or "")),
            )
            for failure in status.failures
        ]
        output.table(("rank", "host", "step", "batch", "phase", "how", "message"), rows, right=("step", "batch"))
        trace = str(status.failures[0].get("traceback") or "").rstrip().splitlines()
        if trace:
            output.say(f"\ntraceback of rank {status.failures[0]['rank']}")
            for line in (["..."] if len(trace) > _FEW_LINES else []) + trace[-_FEW_LINES:]:
                output.say(f"  {line}")
    if reports := one.reports():
        output.say(f"\nreports of a hang, with the stacks of all threads: {reports[0].parent}")


def _print_metrics(one: Run, metrics: Metrics) -> None:
    for problem in metrics.problems:
        output.say(f"cannot be read: {problem}")
    if not metrics.curves:
        return
    output.say(f"\nmetrics ({metrics.source})")
    rows = []
    for name, curve in list(metrics.curves.items())[:_FEW]:
        step = f"{curve.steps[-1]:.0f}" if curve.steps else ""
        bad = "" if curve.first_bad is None else f"first nan at step {curve.first_bad:.0f}"
        ends = [number(finite(value)) for value in (curve.least, curve.greatest)]
        rows.append((name, number(curve.last), step, *ends, f"{curve.count:,}", bad))
    output.table(
        ("metric", "last", "step", "least", "greatest", "points", ""),
        rows,
        right=("last", "step", "least", "greatest", "points"),
    )
    if len(metrics.curves) > _FEW:
        output.say(f"and {len(metrics.curves) - _FEW} more (--json has all)")


def _print_times(one: Run) -> None:
    summary = one.status.said.get("summary")
    times = summary.get("time_s") if isinstance(summary, dict) else None
    if isinstance(times, dict):
        known = {name: times[name] for name in _TIMES if isinstance(times.get(name), float) and times[name] < 1e12}
        whole = sum(known.values()) or 1.0
        parts = [f"{name} {value / whole:.0%}" for name, value in known.items() if value / whole >= 0.005]
        output.say(f"\ntime: {output.count(round(whole), 'second')}: {', '.join(parts)}")


def _print_checkpoints(checkpoints: list[dict[str, Any]]) -> None:
    if not checkpoints:
        return
    from instep.checkpoint.described import state_of  # late: loads torch, for a run that has checkpoints

    output.say("\ncheckpoints")
    rows = [
        (
            *(entry.get(key) for key in ("name", "step", "kind", "epoch")),
            None if entry.get("score") is None else f"{entry['monitor']}={entry['score']:.6g}",
            output.size(entry["bytes"]),
            output.age(entry["created"]) if entry.get("created") else None,
            state_of(entry),
        )
        for entry in checkpoints
    ]
    output.table(("checkpoint", "step", "kind", "epoch", "score", "size", "created", "state"), rows, ("step", "epoch"))


def _print_log(one: Run, lines: int | None) -> None:
    if lines is None:
        lines = 20 if one.status.state in _BAD else 0
    newest = next(iter(one.logs()), None) if lines > 0 else None
    if newest is not None and (text := tail(newest, lines).rstrip("\n")):
        output.say(f"\nend of {newest.relative_to(one.folder)}")
        output.say(text)


def _print_go_on(one: Run) -> None:
    line = how_to_go_on(one.status.said)
    if not line:
        return
    cwd = one.status.said.get("cwd")
    output.say("\nit goes on with")
    if isinstance(cwd, str) and Path(cwd) != Path.cwd():
        output.say(f"  cd {shlex.quote(cwd)}")
    output.say(f"  {line}")
    if HIDDEN in line:
        output.say(f"  ({HIDDEN} stands for secrets, which are not kept)")
