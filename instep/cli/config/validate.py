"""Check config files: names, values, and what contradicts what. 1 where something is wrong.

Examples:
  instep config validate
  instep config validate runs/*.yaml
  instep config validate --schema > instep.schema.json      # for an editor
"""

from __future__ import annotations

import argparse

from instep.cli import output
from instep.cli.config.files import target
from instep.config.layers import find_file, resolve
from instep.config.settings import schema
from instep.errors import SettingError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="files or templates (default: the one that launches use)"
    )
    parser.add_argument("--config", metavar="FILE", action="append", help="the same")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema instead")


def run(args: argparse.Namespace) -> int:
    """Check each; print what is wrong."""
    if args.schema:
        output.say_json(schema())
        return 0
    problems = False
    for config in [*args.files, *(args.config or [])] or [str(target(None))]:
        try:
            find_file(config, {})
            launch = resolve(config=config, environ={})
            launch.check()
        except SettingError as error:
            problems = True
            output.say(f"WRONG  {config}")
            for line in str(error).splitlines():
                output.say(f"    {line}")
        else:
            output.say(f"ok  {config}, {output.count(len(launch.sources), 'setting')}")
    return int(problems)
