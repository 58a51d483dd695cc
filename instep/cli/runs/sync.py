"""Send the records that a run's trackers did not get, because they were unreachable or the run was killed.

The records wait in `RUN/loggers/`, in one file for each tracker. They are sent in the order in which they were logged,
without those that the tracker has already. Nothing is sent for a run that still goes on, since it sends them itself.

The records go where the run's logger wrote. If you did not make the run yourself on this machine, the command shows the
place and the files, and sends nothing until you agree. Even then no file from outside the run folder is sent, and none
of your passwords and keys goes to a host that only the run folder names.

Exit codes: 0 all records have arrived; 1 some are still waiting, or an error; 2 wrong arguments.

Examples:
  instep runs sync instep_runs/version_3
  instep runs sync instep_runs/version_3 --import my_project.loggers
  instep runs sync copied/version_3 --yes
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from instep.cli import output
from instep.errors import UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("path", metavar="RUN", help="the run folder")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="at most, for one tracker (default: 600)"
    )
    parser.add_argument("--import", dest="module", metavar="MODULE", help="a module that registers loggers of your own")
    parser.add_argument("--yes", action="store_true", help="send what a run that you did not make names, as it says")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Send the waiting records, and print what was sent."""
    from instep.loggers.sync import sync

    folder = Path(args.path)
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give that of a run, such as instep_runs/version_0")
    if args.module:
        sys.path.insert(0, "")
        import_module(args.module)

    def ask(what: str) -> None:
        output.confirm(what, "Send it?", "Look at it, then send it with --yes.", "nothing was sent", args.yes)

    done = list(sync(folder, args.timeout, ask))
    if args.json:
        output.say_json({"run": str(folder), "loggers": [one._asdict() for one in done]})
    elif not done:
        output.say(f"nothing waits in {folder}")
    else:
        rows = [(one.logger, one.waited, one.waited - one.left, one.left, one.reason) for one in done]
        output.table(("logger", "waited", "sent", "left", "why"), rows, right=("waited", "sent", "left"))
    return 1 if any(one.left for one in done) else 0
