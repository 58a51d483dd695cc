"""Compare runs: the hyperparameters in which they differ, and where their metrics ended.

Examples:
  instep runs compare instep_runs/version_3 instep_runs/version_7
  instep runs compare runs --limit 5 -m val_loss,val_accuracy    the newest five
  instep runs compare a b --all                                  what is the same too
  instep runs compare a b --json | jq .hparams
"""

from __future__ import annotations

import argparse
from typing import Any

from instep.cli import output
from instep.cli.runs.chosen import add_paths, ends, find, finite, number, settings, titles
from instep.errors import UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_paths(parser, 6)
    parser.add_argument("--all", action="store_true", help="show the hyperparameters that are the same, too")


def run(args: argparse.Namespace) -> int:
    """Print what differs."""
    runs = find(args.paths, args.limit)
    params = [settings(run) for run in runs]
    keys = list(dict.fromkeys(key for each in params for key in each))
    missing = object()
    differs = [key for key in keys if any(each.get(key, missing) != params[0].get(key, missing) for each in params)]
    curves = [run.metrics(args.metrics, 100).curves for run in runs]
    metrics = list(dict.fromkeys(name for each in curves for name in each))
    if lacking := [name for name in args.metrics or () if name not in metrics]:
        there = dict.fromkeys(name for run in runs for name in run.metrics(None, 4).curves)
        raise UsageError(f"no run has the metric {lacking[0]!r}; there are {', '.join([*there][:20])}")
    if args.json:
        output.say_json(
            {
                "runs": [{"name": run.name, "folder": str(run.folder), "state": run.status.state} for run in runs],
                "hparams": {key: [each.get(key) for each in params] for key in differs},
                "same": {key: params[0].get(key) for key in keys if key not in differs},
                "metrics": {name: [ends(each.get(name)) for each in curves] for name in metrics},
            }
        )
        return 0
    headers = titles(runs)
    output.table(("", *headers), [("state", *(run.status.state for run in runs))])
    shown = keys if args.all else differs
    if shown:
        output.say()
        rows = [(key, *(each.get(key) for each in params)) for key in shown]
        output.table(("hyperparameter", *headers), rows, right=headers)
    same = len(keys) - len(shown)
    if same:
        output.say(f"{output.count(same, 'hyperparameter')} the same in all (--all shows them)")
    if metrics:
        output.say()
        rows = [(name, *(_cell(each.get(name)) for each in curves)) for name in metrics]
        output.table(("metric: last (least .. greatest)", *headers), rows, right=headers)
    return 0


def _cell(curve: Any) -> str:
    if curve is None:
        return ""
    bad = f", first nan at step {curve.first_bad:.0f}" if curve.first_bad is not None else ""
    return f"{number(curve.last)} ({number(finite(curve.least))} .. {number(finite(curve.greatest))}{bad})"
