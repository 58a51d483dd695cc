"""Show a run: what it is doing or did last, why it ended on each rank, its last metrics, and how to resume it.

For a folder with several runs, the newest is shown. `--verify` compares every byte of the checkpoints with its
checksum. Epochs count from 1, as in the output of the training; in --json they count from 0, as in the files.

Examples:
  instep runs show instep_runs/version_0
  instep runs show .                                       the newest run below this folder
  instep runs show instep_runs/version_0 --verify --log 200
  instep runs show . --json | jq -r .go_on
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from typing import Any

from instep.cli import output
from instep.cli.runs.chosen import find
from instep.health.run_status import how_to_go_on
from instep.runs import Metrics, Run, find_runs
from instep.runs.entries import Entry, ends_of
from instep.runs.facts import (
    end_of_log,
    failure_rows,
    lines_to_go_on,
    metric_rows,
    state_lines,
    time_shares,
    traceback_of,
)
from instep.runs.table import MARK, upright

_BAD = ("failed", "hung", "dead", "interrupted", "preempted")
_FEW = 20  # maximum number of metrics that are printed; --json has all metrics


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="RUN", nargs="?", default=".", help="a run, or a folder of runs (default: .)")
    parser.add_argument("--verify", action="store_true", help="read every byte of the checkpoints")
    parser.add_argument(
        "--log", type=int, metavar="LINES", help="lines of the newest log to show (default: 20 where it went wrong)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print all that is known about a run."""
    entries = find([args.path])
    if len(entries) > 1:
        sys.stderr.write(f"instep: the newest of {len(entries):,} runs\n")
    # Read the run completely, since an entry of the list has only a part of it.
    one = find_runs(entries[0].run.folder)[0]
    metrics, checkpoints = one.metrics(None, 100), one.checkpoints(args.verify)
    if args.json:
        output.say_json(
            {
                **entries[0].describe(),
                "said": one.status.said,
                "progress": one.status.progress,
                "failures": one.status.failures,
                "go_on": how_to_go_on(one.status.said),
                "metrics": {name: ends_of(curve).describe() for name, curve in metrics.curves.items()},
                "checkpoints": checkpoints,
                "hparams": one.hparams,
                "reports": [str(path) for path in one.reports()],
                "logs": [str(path) for path in one.logs()],
                "problems": [*one.problems, *metrics.problems],
            }
        )
        return 0
    _print_state(entries[0], one)
    _print_failures(one)
    _print_metrics(metrics)
    if times := time_shares(one.status.said):
        output.say(f"\ntime: {times}")
    _print_checkpoints(checkpoints)
    output.tree("hyperparameters", entries[0].params)
    bad = one.status.state in _BAD
    for line in end_of_log(one, (20 if bad else 0) if args.log is None else args.log):
        output.say(line)
    if bad:  # the commands to resume a run come last, where a reader looks first
        for line in lines_to_go_on(one.status.said):
            output.say(line)
    return 0


def _print_state(entry: Entry, one: Run) -> None:
    status, said = one.status, one.status.said
    output.say(f"{upright(entry.name)}: {entry.outcome}", MARK)
    output.say(f"{one.folder}")
    if one.label.tags:
        output.say(f"tags: {' '.join(one.label.tags)}")
    for line in one.label.note.splitlines():
        output.say(f"note: {upright(line)}", MARK)
    where = [f"{key} {said[key]}" for key in ("host", "pid", "world_size", "strategy", "device") if said.get(key)]
    times = [f"{name} {_ago(said.get(key))}" for name, key in (("started", "started"), ("ended", "ended"))]
    facts = ", ".join([*where, *(text for text in times if not text.endswith(" "))])
    problems = [f"cannot be read: {problem}" for problem in one.problems]
    for line in (*state_lines(status, _ago(status.progress.get("time"))), *filter(None, [facts]), *problems):
        output.say(line)


def _ago(seconds: Any) -> str:
    try:
        return output.age(datetime.fromtimestamp(seconds, timezone.utc).isoformat())
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _print_failures(one: Run) -> None:
    status = one.status
    if status.failures:
        output.say()
        heads = ("rank", "host", "step", "batch", "phase", "how", "message")
        output.table(heads, failure_rows(status), right=("step", "batch"))
    for line in traceback_of(status):
        output.say(line)
    if reports := one.reports():
        output.say(f"\nreports of a hang, with the stacks of all threads: {reports[0].parent}")


def _print_metrics(metrics: Metrics) -> None:
    for problem in metrics.problems:
        output.say(f"cannot be read: {problem}")
    rows = metric_rows(metrics)
    if rows:
        output.say(f"\nmetrics ({metrics.source})")
        bad = [""] if any(row[6] for row in rows) else []
        heads = ("metric", "last", "step", "least", "greatest", "points", *bad)
        output.table(heads, [row[: len(heads)] for row in rows[:_FEW]], right=heads[1:6])
    if len(rows) > _FEW:
        output.say(f"and {len(rows) - _FEW} more (--json has all)")


def _print_checkpoints(checkpoints: list[dict[str, Any]]) -> None:
    if not checkpoints:
        return
    from instep.checkpoint.described import state_of  # imported late, since it loads torch

    output.say("\ncheckpoints")
    rows = [
        (
            *(entry.get(key) for key in ("name", "step", "kind")),
            entry["epoch"] + 1 if isinstance(entry.get("epoch"), int) else None,
            None if entry.get("score") is None else f"{entry['monitor']}={entry['score']:.6g}",
            output.size(entry["bytes"]),
            output.age(entry["created"]) if entry.get("created") else None,
            state_of(entry),
        )
        for entry in checkpoints
    ]
    output.table(("checkpoint", "step", "kind", "epoch", "score", "size", "created", "state"), rows, ("step", "epoch"))
