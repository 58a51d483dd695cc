"""Write a config file without questions: the devices of this machine, and what is given here.

Examples:
  instep config default
  instep config default --config runs/debug.yaml precision=bf16-mixed strategy=fsdp
  instep launch train.py                      # then uses it
"""

from __future__ import annotations

import argparse

from instep.cli import output
from instep.cli.config.files import add_config, assignments, complete_setting, laid_over, target, use, write_file
from instep.errors import UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_config(parser)
    add = parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings to put there")
    add.completer = complete_setting  # pyright: ignore[reportAttributeAccessIssue]
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    path, said = target(args.config), assignments(args.settings)
    if path.exists() and not args.force:
        raise UsageError(f"{path} exists: `instep config update NAME=VALUE` changes it, `--force` overwrites it")
    from instep.cli.config.files import found  # late: loads torch

    write_file(path, laid_over(found(), said))
    output.say(f"wrote {path}; {use(path)}")
    return 0
