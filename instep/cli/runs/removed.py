"""Remove runs, and empty the trash that they go to."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from instep.cli import output
from instep.cli.runs.chosen import add_run
from instep.runs.entries import find_one
from instep.runs.trash import check_removable, describe, empty, find_trash, remove


class Rm:
    """Remove runs: each folder moves into a trash beside it, and `instep runs empty-trash` deletes it for good.

    It shows what goes, and asks. A run that goes on is left alone, and so are other programs' runs, other users', and
    what a link in the run leads to. What was sent to a tracker stays there.

    Examples:
      instep runs rm instep_runs/version_3
      instep runs rm "lr=1 batch=8" instep_runs/version_4 --yes
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        add_run(parser, several=True)
        parser.add_argument("--yes", action="store_true", help="do not ask")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        found = {(entry := find_one(path)).run.folder: entry.name for path in args.runs}
        for folder in found:
            check_removable(folder)
        what = "\n".join(f"{name}: {describe(folder)}" for folder, name in found.items())
        output.confirm(what, "Move to the trash?", "Look at it, then say --yes.", "nothing was removed", args.yes)
        for folder in found:
            back = shlex.join(["mv", str(remove(folder)), str(folder)])
            output.say(f"{folder} is in the trash; it comes back with\n  {back}")
        return 0


class EmptyTrash:
    """Delete for good the runs that `instep runs rm` removed at DIR and below. It shows what goes, and asks.

    Examples:
      instep runs empty-trash
      instep runs empty-trash instep_runs --yes
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path", metavar="DIR", nargs="?", default=".", help="where to look (default: .)")
        parser.add_argument("--yes", action="store_true", help="do not ask")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        removed = find_trash(Path(args.path))
        if not removed:
            output.say(f"the trash at {args.path} and below is empty")
            return 0
        what = "\n".join(map(describe, removed))
        output.confirm(what, "Delete for good?", "Look at it, then say --yes.", "nothing was deleted", args.yes)
        for path in removed:
            empty(path)
        output.say(f"{output.count(len(removed), 'run')} deleted")
        return 0
