"""Compare every byte of the checkpoints at PATH with the checksums that were computed when they were written.

Prints which file is damaged, and for a large file which chunk of 64 MiB.

Examples:
  instep checkpoint verify instep_runs/version_0                          all of a run
  instep checkpoint verify instep_runs/version_0/checkpoints/step-00001200-1
  instep checkpoint verify . --json || echo damaged
"""

from __future__ import annotations

import argparse
from typing import Any

from instep.cli import output


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="a checkpoint, run, or folder of runs")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print a result for each checkpoint; return 1 if one does not verify, else 0."""
    from instep.checkpoint.described import sizes
    from instep.checkpoint.scan import Broken  # imported late, since it loads torch
    from instep.cli.checkpoint.targets import find

    results: list[dict[str, Any]] = []
    for folder in find(args.path):
        for what in folder.found:
            if isinstance(what, Broken):
                problems = [what.problem]
            else:
                problems = folder.store.verify(what.path)
            count = sum(sizes(what.path, folder.store.files).values())
            results.append({"path": str(what.path), "ok": not problems, "bytes": count, "problems": problems})
            if not args.json:  # print each result at once, since the next checkpoint may take minutes
                output.say(f"{'DAMAGED' if problems else 'ok'}  {what.path}  ({output.size(count)})")
                for problem in problems:
                    output.say(f"    {problem}")
    damaged = sum(not result["ok"] for result in results)
    if args.json:
        output.say_json({"checkpoints": results, "damaged": damaged})
    else:
        output.say(f"{len(results) - damaged} verified, {damaged} damaged")
    return int(damaged > 0)
