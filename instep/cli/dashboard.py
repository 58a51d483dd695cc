"""Show run folders in a browser, on a local page that follows the runs while they go on.

The page shows the runs at DIR and below: their state and why they ended, their checkpoints and whether these are whole,
failures and hangs by rank, the hardware, the end of the log, hyperparameters, and a plot of chosen metrics over runs.

By default only this machine can open the page. With --host other machines can open it too, and it then needs a token,
which is part of the printed address. --token requires the token on this machine too, where other users could look.

Needs the extra: pip install 'instep[dashboard]'

Examples:
  instep dashboard                          runs below this folder
  instep dashboard runs/digits --port 0     any free port
  instep dashboard --host 0.0.0.0           for other machines; better: ssh -L 8899:localhost:8899 HOST
"""

from __future__ import annotations

import argparse

from instep.utils.paths import local_path


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument(
        "dir", nargs="?", default=".", metavar="DIR", help="a run, or a folder that has runs (default: .)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8899, help="0: any free one (default: 8899)")
    parser.add_argument("--token", action="store_true", help="ask for a token on this machine too")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument(
        "--tensorboard", metavar="URL", default="http://localhost:6006", help="a page to link to (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    from instep.dashboard.server import Address, serve  # imported late, so that `--help` does not load it
    from instep.sweeps import define

    address = Address(args.host, args.port, args.token)
    serve(local_path(args.dir), address, {"Sweep": define}, not args.no_open, args.tensorboard)
    return 0
