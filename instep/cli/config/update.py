"""Change settings of the config file, or take those of another file over, also of one of Accelerate's.

What Accelerate calls otherwise is renamed; what has no setting here is listed with what takes its place.

Examples:
  instep config update precision=bf16-mixed max_restarts=3
  instep config update --unset strategy strategy_options
  instep config update --from ~/.cache/huggingface/accelerate/default_config.yaml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instep.cli import output
from instep.cli.config.files import add_config, assignments, target, write_file
from instep.errors import SettingError
from instep.launch.elsewhere import advice, translate
from instep.launch.settings import NAMES, check
from instep.launch.sources import read_file


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_config(parser)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings to change")
    parser.add_argument("--unset", nargs="+", metavar="NAME", default=[], help="settings to leave open again")
    parser.add_argument("--from", dest="other", metavar="FILE", help="a file whose settings are taken over first")


def run(args: argparse.Namespace) -> int:
    """Rewrite the file."""
    path = target(args.config)
    said = read_file(path) if path.exists() else {}
    values = check({name: it[0] for name, it in said.items()}, {name: it[1] for name, it in said.items()})
    left: list[str] = []
    if args.other is not None:
        other = read_file(Path(args.other).expanduser(), check_names=False)
        taken, left = translate({name: value for name, (value, _) in other.items()})
        values |= check(taken, {name: str(args.other) for name in taken})
    values |= assignments(args.settings)
    for name in args.unset:
        if name not in NAMES:
            raise SettingError(advice(name), field="unset", got=name)
        values.pop(name, None)
    write_file(path, values)
    output.say(f"wrote {path}, {output.count(len(values), 'setting')}")
    for text in left:
        sys.stderr.write(f"instep: not taken over: {text}\n")
    return 0
