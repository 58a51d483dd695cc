"""Every setting of a launch: its value, where that comes from, and what it is.

An option of `instep launch` wins over the config file, that over the variable INSTEP_NAME, that over the default.

Examples:
  instep config show
  instep config show --config fsdp
  INSTEP_PRECISION=bf16-mixed instep config show --json
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from instep.cli import output
from instep.cli.config.files import CONFIG_HELP
from instep.config.layers import Launch, default_file, resolve
from instep.config.settings import NAMES, about
from instep.utils.redact import hide


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--config", metavar="FILE", help=f"{CONFIG_HELP}, or a template")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the settings."""
    launch = resolve(config=args.config)
    if args.json:
        output.say_json({"file": launch.file, "settings": as_json(launch)})
        return 0
    missing = "" if default_file().is_file() else f" ({default_file()} does not exist)"
    output.say(f"config file: {launch.file or f'none{missing}'}")
    print_settings(launch)
    return 0


def as_json(launch: Launch) -> dict[str, Any]:
    """Every setting with its value and source."""
    return {
        name: {"value": hide(getattr(launch.settings, name)), "source": launch.sources.get(name, "default")}
        for name in NAMES
    }


def print_settings(launch: Launch, explain: bool = True) -> None:
    """A table of them."""
    rows = [(name, _text(it["value"]), it["source"], about(name).text) for name, it in as_json(launch).items()]
    columns = ("setting", "value", "from", "what it is")[: 4 if explain else 3]
    output.table(columns, [row[: len(columns)] for row in rows])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
