"""The config files that come with instep: use one by its name, or begin with it.

Examples:
  instep config templates
  instep launch --config fsdp train.py
  instep config templates fsdp > fsdp.yaml                  # to change it
"""

from __future__ import annotations

import argparse
import sys

from instep.cli import output
from instep.config.layers import TEMPLATES, templates
from instep.errors import one_of


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    name = parser.add_argument("name", nargs="?", help="print this one")
    name.completer = lambda **_: list(templates())  # pyright: ignore[reportAttributeAccessIssue]
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """List them, or print one."""
    known = templates()
    if args.name is not None:
        if args.name not in known:
            raise one_of("name", args.name, known)
        sys.stdout.write((TEMPLATES / f"{args.name}.yaml").read_text(encoding="utf-8"))
    elif args.json:
        output.say_json(known)
    else:
        output.table(("name", "what it is for"), known.items())
    return 0
