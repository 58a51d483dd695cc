"""List the runs at DIR and below, the newest first, one line each, with differing hyperparameters and a metric.

A run is a folder of any logger: of instep, Lightning, TensorBoard, or W&B offline. The best value of a metric is the
least, or the greatest if a run ranked its checkpoints so, or if its name looks like an accuracy; `*` marks the best
run. The state "dead" means that the run stopped without recording why. On a terminal, columns that do not fit are left
out; --columns chooses them.

Examples:
  instep runs ls                                           all runs below this folder
  instep runs ls instep_runs --sort val_loss               the best first
  instep runs ls runs -c lr,model/width,val_acc:max
  instep runs ls --where "lr<0.1 and state=finished"
  instep runs ls --where "tag=baseline or name~warmup or not why=''"
  instep runs ls runs --csv > runs.csv
"""

from __future__ import annotations

import argparse
import shutil
import sys
from textwrap import wrap

from instep.cli import output
from instep.cli.runs.chosen import find, names
from instep.errors import UsageError
from instep.runs.status import STATES
from instep.runs.table import MARK, Table, fit


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="DIR", nargs="?", default=".", help="a run, or a folder of runs (default: .)")
    parser.add_argument("-c", "--columns", type=names, default=[], metavar="NAMES", help="hyperparameters and metrics")
    parser.add_argument("--sort", metavar="NAME", default="", help="the best or smallest first; NAME:max: the greatest")
    parser.add_argument("--where", metavar="CONDITION", default="", help="only such runs, as 'lr<0.1 and tag=good'")
    parser.add_argument("--state", type=names, default=[], metavar="STATES", help=f"of {', '.join(STATES)}")
    parser.add_argument("-a", "--all", action="store_true", help="archived runs too")
    parser.add_argument("--csv", action="store_true", help="for spreadsheets")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the runs as a table, as CSV or as JSON."""
    if unknown := [state for state in args.state if state not in STATES]:
        raise UsageError(f"no run is ever {unknown[0]!r}; the states are {', '.join(STATES)}")
    found = [entry for entry in find([args.path]) if args.all or not entry.run.label.archived]
    found = [entry for entry in found if not args.state or entry.run.status.state in args.state]
    table = Table.of(found, args.columns, args.sort, args.where)
    if args.json:
        output.say_json({"runs": [entry.describe() for entry in table.entries]})
    elif args.csv:
        output.say(table.csv())
    else:
        print_table(table)
    return 0


def print_table(table: Table) -> None:
    """Print a line for each run; on a terminal, also print a summary."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines, gone, told = fit(table.columns(output.age), width)
    for line in lines:
        output.say(line, MARK)
    if width is None:
        return
    output.say()
    for line in table.summary(told, gone):
        for part in wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False):
            output.say(part, MARK)
