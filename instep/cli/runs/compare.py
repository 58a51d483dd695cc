"""Compare runs: the hyperparameters that differ, and the last values of metrics; more than three runs get a line each.

Examples:
  instep runs compare instep_runs/version_3 instep_runs/version_7
  instep runs compare runs --limit 5 -m val_loss,val_accuracy    the newest five
  instep runs compare a b --all                                  what is the same too
  instep runs compare a b --json | jq .hparams
"""

from __future__ import annotations

import argparse
import math

from instep.cli import output
from instep.cli.runs.chosen import find, names
from instep.cli.runs.ls import print_table
from instep.errors import UsageError
from instep.runs.entries import Ends
from instep.runs.facts import number
from instep.runs.naming import differing
from instep.runs.table import Table, metric_of

_BESIDE = 3  # maximum number of runs that are shown side by side


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("paths", metavar="DIR", nargs="*", default=["."], help="runs, or folders of runs (default: .)")
    parser.add_argument("-m", "--metrics", type=names, metavar="NAMES", help="the metrics, with commas between them")
    parser.add_argument("-n", "--limit", type=int, default=6, metavar="N", help="the newest N runs (default: 6)")
    parser.add_argument("--all", action="store_true", help="show the hyperparameters that are the same, too")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the differences between runs."""
    entries = find(args.paths, max(1, args.limit))
    params = [entry.params for entry in entries]
    keys = list(dict.fromkeys(key for each in params for key in each))
    differs = differing(params)
    there = list(dict.fromkeys(name for entry in entries for name in entry.ends if name not in ("epoch", "hp_metric")))
    metrics = [metric_of(name, entries) for name in args.metrics or there]
    if lacking := [metric.name for metric in metrics if metric.name not in there]:
        raise UsageError(f"no run has the metric {lacking[0]!r}; there are {', '.join(there[:20])}")
    ends = {metric.name: [entry.ends.get(metric.name) for entry in entries] for metric in metrics}
    if len(entries) > _BESIDE and not args.json:
        print_table(Table(entries, keys if args.all else differs, metrics))
        return 0
    if args.json:
        output.say_json(
            {
                "runs": [
                    {"name": entry.name, "folder": str(entry.run.folder), "state": entry.run.status.state}
                    for entry in entries
                ],
                "hparams": {key: [each.get(key) for each in params] for key in differs},
                "same": {key: params[0].get(key) for key in keys if key not in differs},
                "metrics": {name: [one and one.describe() for one in each] for name, each in ends.items()},
            }
        )
        return 0
    headers = [entry.name for entry in entries]
    output.table(("", *headers), [("state", *(entry.outcome for entry in entries))])
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
        rows = [(name, *map(_cell, each)) for name, each in ends.items()]
        output.table(("metric: last (least .. greatest)", *headers), rows, right=headers)
    return 0


def _cell(ends: Ends | None) -> str:
    if ends is None:
        return ""
    bad = "" if math.isnan(ends.first_bad) else f", first nan at step {ends.first_bad:.0f}"
    return f"{number(ends.last)} ({number(ends.least)} .. {number(ends.greatest)}{bad})"
