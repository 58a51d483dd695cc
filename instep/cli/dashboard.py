"""Show run folders in a browser: a live local page of what no tracker shows.

The runs at DIR and below with their state and why they ended, checkpoints and whether they are whole, failures and
hangs by rank, the hardware, the tail of the log, hyperparameters, and one plot of chosen metrics over runs.

The page is for this machine alone. With --host other machines reach it; it has a token then, which is in the address
that is printed. --token asks for one on this machine too, where other users of it could look.

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
    """Add the arguments."""
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
    """Serve until Ctrl-C."""
    from instep.dashboard.server import Address, serve  # imported late: help costs nothing
    from instep.sweeps import define

    address = Address(args.host, args.port, args.token)
    serve(local_path(args.dir), address, {"Sweep": define}, not args.no_open, args.tensorboard)
    return 0
