"""Print the samples of an optimizer step, by rank: their indices, and in a stream the file and record of each.

Nothing runs again: the samples follow from the seed and from a few positions that the run has recorded. If instep does
not choose the order of the data, as with your own batch sampler or an iterable, `instep replay` shows the samples.

Examples:
  instep runs samples instep_runs/version_0 --step 1200
  instep runs samples version_0 --step 1200                by the name that `instep runs ls` shows
  instep runs samples . --step 1200 --rank 3               the newest run below this folder
  instep runs samples . --step 1200 --json | jq .batches
"""

from __future__ import annotations

import argparse

from instep.cli import output
from instep.cli.runs.chosen import find


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="RUN", nargs="?", default=".", help="a run, or a folder of runs (default: .)")
    parser.add_argument("--step", type=int, required=True, help="the optimizer step, from 1: global_step after it")
    parser.add_argument("--rank", type=int, help="of this rank alone")
    parser.add_argument("--cache", metavar="DIR", help="the cache= of a StreamDataset with bucket=, if it had one")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the samples."""
    from instep.streams.ledger import lines_of, samples_in  # imported late, since it loads torch

    answer = samples_in([entry.run.folder for entry in find([args.path])], args.step, args.rank, args.cache)
    output.say_json(answer) if args.json else output.say("\n".join(lines_of(answer)))
    return 0
