"""Name the samples that an optimizer step had, by rank: their indices, and the file and record of each in a stream.

Nothing is run again: the samples follow from the seed and from a few positions that the run has written. For data whose
order is not instep's own, such as batches of your own sampler or an iterable, `instep replay` shows them.

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
from instep.errors import UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("path", metavar="RUN", nargs="?", default=".", help="a run, or a folder of runs (default: .)")
    parser.add_argument("--step", type=int, required=True, help="the optimizer step, from 1: global_step after it")
    parser.add_argument("--rank", type=int, help="of this rank alone")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the samples."""
    from instep.streams.ledger import NAME, samples_of  # late: loads torch

    entries = find([args.path])
    folder = next((entry.run.folder for entry in entries if (entry.run.folder / NAME).exists()), None)
    if folder is None:
        raise UsageError(f"there is no {NAME} in {entries[0].run.folder}. A fit writes it into its run folder")
    answer = samples_of(folder, args.step)
    batches = [batch for batch in answer["batches"] if args.rank in (None, batch["rank"])]
    if not batches:
        raise UsageError(f"step {args.step} had no rank {args.rank}")
    if args.json:
        output.say_json({**answer, "batches": batches})
        return 0
    output.say(f"{folder}: step {args.step} is in epoch {answer['epoch'] + 1}")
    for batch in batches:
        named = zip(batch["samples"], batch.get("places") or [""] * len(batch["samples"]), strict=True)
        texts = [f"  {sample}  {place}".rstrip() for sample, place in named]
        output.say("\n".join((f"rank {batch['rank']}, batch {batch['batch']}:", *(texts or ["  none of its own"]))))
    return 0
