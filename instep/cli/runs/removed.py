"""`instep runs rm` and `instep runs empty-trash`: move runs to the trash, and delete them from there."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from instep.cli import output
from instep.cli.runs.chosen import add_run
from instep.runs.entries import find_one
from instep.runs.trash import check_removable, describe, empty, find_trash, remove


class Rm:
    """Remove runs: move each folder into a trash folder beside it, which `instep runs empty-trash` deletes for good.

    It prints what will be removed, and asks. It refuses a run that still goes on, a folder of another program and a run
    of another user. It does not follow links inside a run. What was sent to a tracker stays there.

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
    """Delete for good the runs at DIR and below that `instep runs rm` removed. It prints what it will delete, and asks.

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
