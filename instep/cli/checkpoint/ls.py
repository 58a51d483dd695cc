"""List the checkpoints at PATH and below, the newest first.

It also prints which checkpoints are broken and why, which saves are in progress or were interrupted, and which run has
locked the folder. Only the sizes of files are checked; `instep checkpoint verify` reads every byte.

Examples:
  instep checkpoint ls .                                  all runs below this folder
  instep checkpoint ls instep_runs/version_0              one run
  instep checkpoint ls s3://bucket/run --json | jq .
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from instep.cli import output


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="a checkpoint, run, or folder of runs")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the list; return 1 if a checkpoint in it is broken, else 0."""
    from instep.checkpoint.described import describe, holder
    from instep.cli.checkpoint.targets import find  # imported late, since it loads torch

    folders = [
        {
            "folder": str(folder.store.root),
            "lease": holder(folder.store.root, folder.store.files),
            "checkpoints": describe(folder.store, folder.found, folder.leftovers),
        }
        for folder in find(args.path)
    ]
    if args.json:
        output.say_json({"folders": folders})
    else:
        for number, folder in enumerate(folders):
            _print(folder, number)
    return int(any(entry["state"] == "broken" for folder in folders for entry in folder["checkpoints"]))


def _print(folder: dict[str, Any], number: int) -> None:
    if number:
        output.say()
    output.say(folder["folder"])
    from instep.checkpoint.described import state_of  # imported late, since it loads torch

    lease = folder["lease"]
    if lease is not None:
        ended = " (it ended without giving the folder back)" if lease["dead"] else ""
        output.say(f"held by run {lease['run_id']}: {lease['host']}, pid {lease['pid']}, {lease['command']}{ended}")
    rows = []
    for entry in folder["checkpoints"]:
        score, created = entry.get("score"), entry.get("created")
        rows.append(
            (
                *(entry.get(key) for key in ("name", "step", "attempt", "kind", "epoch")),
                None if score is None else f"{entry['monitor']}={score:.6g}",
                output.size(entry["bytes"]),
                None if created is None else output.age(created),
                state_of(entry),
            )
        )
    headers = ("checkpoint", "step", "attempt", "kind", "epoch", "score", "size", "created", "state")
    output.table(headers, rows, right=("step", "attempt", "epoch", "size"))
    broken = [f"{folder['folder']}/{entry['name']}" for entry in folder["checkpoints"] if entry["state"] == "broken"]
    if broken and "://" not in folder["folder"]:
        output.say(f"to clear what is broken: {shlex.join(['rm', '-r', *broken])}")
