"""List the runs at DIR and below, the newest first: how each is, how far it came, and why it ended.

A run is a folder of any logger: of instep, of Lightning, TensorBoard or W&B offline. `--columns` adds hyperparameters
and the last values of metrics. A state "dead" means that the run stopped and nobody could say why.

Examples:
  instep runs ls                                           all runs below this folder
  instep runs ls instep_runs --state failed,hung,dead      what went wrong
  instep runs ls runs -c lr,model/width,val_loss --sort val_loss
  instep runs ls runs --json | jq -r '.runs[] | select(.state == "running") | .folder'
"""

from __future__ import annotations

import argparse
import math
from datetime import datetime, timezone
from typing import Any

from instep.cli import output
from instep.cli.runs.chosen import find, names, number, settings
from instep.errors import UsageError
from instep.health.run_status import in_short
from instep.runs import Run
from instep.runs.status import STATES


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("path", metavar="DIR", nargs="?", default=".", help="a run, or a folder of runs (default: .)")
    parser.add_argument("-c", "--columns", type=names, default=[], metavar="NAMES", help="hyperparameters and metrics")
    parser.add_argument("--sort", metavar="NAME", help="by a hyperparameter or metric, the smallest first")
    parser.add_argument("--state", type=names, default=[], metavar="STATES", help=f"of {', '.join(STATES)}")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    if unknown := [state for state in args.state if state not in STATES]:
        raise UsageError(f"no run is ever {unknown[0]!r}; the states are {', '.join(STATES)}")
    runs = [run for run in find([args.path]) if not args.state or run.status.state in args.state]
    columns: list[str] = list(dict.fromkeys([*args.columns, *([args.sort] if args.sort else [])]))
    rows = [(run, _values(run, columns)) for run in runs]
    if columns and rows:
        _check_known(columns, rows)
    if args.sort:
        rows.sort(key=lambda row: _order(row[1][args.sort]))
    if args.json:
        output.say_json({"runs": [{**describe(run), "columns": values} for run, values in rows]})
        return 0
    output.table(
        ("run", "state", "step", "epoch", *columns, "updated", "why"),
        [_row(run, [values[name] for name in columns]) for run, values in rows],
        right=("step", "epoch", *columns),
    )
    return 0


def describe(run: Run) -> dict[str, Any]:
    """Describe a run for programs."""
    status = run.status
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": status.state,
        "cause": status.cause,
        "by_rank": status.by_rank,
        "step": status.step,
        "epoch": status.epoch,
        "updated": _iso(run),
        **{key: status.said.get(key) for key in ("exit_code", "signal", "run_id", "host", "pid", "checkpoint")},
    }


def _iso(run: Run) -> str:
    return datetime.fromtimestamp(run.updated, timezone.utc).isoformat(timespec="seconds")


def _row(run: Run, values: list[Any]) -> tuple[Any, ...]:
    status = run.status
    cells = [number(value) if isinstance(value, float) else value for value in values]
    why = in_short(status.cause)
    why = why if len(why) <= 100 else f"{why[:97]}..."
    return (run.name, status.state, status.step, status.epoch, *cells, output.age(_iso(run)), why)


def _values(run: Run, columns: list[str]) -> dict[str, Any]:
    known = settings(run) if columns else {}
    wanted = [name for name in columns if name not in known]
    curves = run.metrics(wanted, 4).curves if wanted else {}
    return {name: known[name] if name in known else curves[name].last if name in curves else None for name in columns}


def _check_known(columns: list[str], rows: list[tuple[Run, dict[str, Any]]]) -> None:
    for name in columns:
        if all(values[name] is None for _, values in rows):
            there = [*settings(rows[0][0]), *rows[0][0].metrics(None, 4).curves]
            known = f"; the newest has {', '.join(there[:20])}" if there else ""
            raise UsageError(f"no run has a hyperparameter or metric {name!r}{known}")


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)) and not math.isnan(value):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))
