"""Change settings of the config file, or take those of another file over, also of one of Accelerate's.

Members of env, rdzv_conf and strategy_options are put to those that are there. What Accelerate calls otherwise is
renamed; what has no setting here is listed with what takes its place.

Examples:
  instep config update precision=bf16-mixed max_restarts=3
  instep config update env.NCCL_DEBUG=WARN strategy_options.cpu_offload=true
  instep config update --unset strategy strategy_options env.NCCL_DEBUG
  instep config update --from ~/.cache/huggingface/accelerate/default_config.yaml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instep.cli import output
from instep.cli.config.files import (
    add_config,
    assignments,
    complete_setting,
    laid_over,
    read_settings,
    split,
    target,
    write_file,
)
from instep.config.layers import read_file
from instep.config.porting import translate
from instep.config.settings import check


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_config(parser)
    add = parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings to change")
    add.completer = complete_setting  # pyright: ignore[reportAttributeAccessIssue]
    parser.add_argument("--unset", nargs="+", metavar="NAME", default=[], help="settings to leave open again")
    parser.add_argument("--from", dest="other", metavar="FILE", help="a file whose settings are taken over first")
    parser.set_defaults(fail=parser.error)


def run(args: argparse.Namespace) -> int:
    """Rewrite the file."""
    if not (args.settings or args.unset or args.other):
        args.fail("nothing to change: give NAME=VALUE, --unset NAME or --from FILE")
    path = target(args.config)
    before = values = read_settings(path) if path.exists() else {}
    left: list[str] = []
    if args.other is not None:
        other = read_file(Path(args.other).expanduser(), check_names=False)
        taken, left = translate({name: value for name, (value, _) in other.items()})
        values = laid_over(values, check(taken, {name: str(args.other) for name in taken}))
    values = laid_over(values, assignments(args.settings))
    for name in sorted(before.keys() - values.keys()):
        sys.stderr.write(f"instep: {name} is gone: it was about what has changed\n")
    for name, member in map(split, args.unset):
        if member:
            values.get(name, {}).pop(member, None)
        else:
            values.pop(name, None)
    write_file(path, values)
    output.say(f"wrote {path}, {output.count(len(values), 'setting')}")
    for text in left:
        sys.stderr.write(f"instep: not taken over: {text}\n")
    return 0
