"""Add the settings of a launch to a command's parser, as options.

Each option has its own name, with hyphens or underscores, and the names that other launchers use. Options of other
launchers that have no setting here are refused, and the error says what replaces them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

from instep.config.settings import DICTS, NAMES, OTHER_NAMES, SWITCHES, about, advice, choices, gpu_ids, pairs
from instep.errors import SettingError
from instep.utils.porting import LAUNCH_SWITCHES

_CONFIG = "settings in YAML, or the name of a template (default: ~/.config/instep/config.yaml)"
_METAVARS = {
    "accelerator": "KIND", "num_nodes": "N|MIN:MAX", "master_addr": "HOST", "master_port": "PORT", "ray": "ADDRESS",
    "rdzv_backend": "NAME", "strategy": "NAME", "strategy_options": "OPTIONS", "precision": "NAME", "log_dir": "DIR",
    "tee": "RANKS", "env": "NAME=VALUE",
}  # fmt: skip


class _Say(argparse.Action):
    """Action that records a setting's value from the command line, with the option that gave it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        said = dict(namespace.said)
        for name, value in ({self.dest: values} if self.const is None else self.const).items():
            if name in DICTS:
                try:
                    value = {**said.get(name, ({},))[0], **pairs(name, value)}
                except SettingError as error:
                    raise argparse.ArgumentError(self, str(error)) from None
            if option_string in ("--gpu-ids", "--gpu_ids"):
                value = gpu_ids(value)
            said[name] = value, option_string or name
        namespace.said = said


def add_settings(
    parser: argparse.ArgumentParser,
    names: Iterable[str] = NAMES,
    hidden: bool = False,
    instead: Mapping[str, str] | None = None,
) -> None:
    """Add options for settings, and `--config`, to a command; `args.said` holds the given values, for `resolve`.

    Args:
        parser: parser of the command.
        names: names of the settings.
        hidden: whether to leave the options out of the help.
        instead: for a setting that has another option in this command: that option, which an error names.
    """
    parser.allow_abbrev = False  # an abbreviation such as `--num` may be an option of the user's program
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=118)
    parser.error = _with_advice(parser.error, instead or {})  # pyright: ignore[reportAttributeAccessIssue]
    parser.set_defaults(said={})
    parser.add_argument("--config", metavar="FILE", help=_CONFIG).completer = complete_config  # pyright: ignore[reportAttributeAccessIssue]
    parser.add_argument("--config-file", "--config_file", dest="config", help=argparse.SUPPRESS)
    for name in names:
        shown = argparse.SUPPRESS if hidden or about(name).rare else about(name).text
        if name in SWITCHES:
            _add(parser, name, shown, const={name: True}, nargs=0)
            _add(parser, f"no_{name}", argparse.SUPPRESS, const={name: False}, nargs=0)
        else:
            action = _add(parser, name, shown, metavar=_METAVARS.get(name, "N"))
            if choices(name):  # true if the shell can complete the values of this setting
                action.completer = lambda *_, name=name, **__: choices(name)  # pyright: ignore[reportAttributeAccessIssue]
        for other in (other for other, mine in OTHER_NAMES.items() if mine == name):
            kind = {"const": {name: True}, "nargs": 0} if name in SWITCHES else {}
            _add(parser, other, argparse.SUPPRESS, dest=name, **kind)
    for other, means in LAUNCH_SWITCHES.items():
        if means.keys() <= set(names):
            _add(parser, other, argparse.SUPPRESS, const=means, nargs=0)


def _add(parser: argparse.ArgumentParser, name: str, shown: str, **kind: Any) -> argparse.Action:
    hyphened = name.replace("_", "-")
    action = parser.add_argument(f"--{hyphened}", action=_Say, help=shown.replace("%", "%%"), **kind)
    if hyphened != name:
        kind.setdefault("dest", name)
        parser.add_argument(f"--{name}", action=_Say, help=argparse.SUPPRESS, **kind)
    return action


def complete_config(prefix: str, **_: Any) -> list[str]:
    """List the completions of `--config` for a shell: templates and files."""
    from argcomplete.completers import FilesCompleter  # imported late, since only a shell that completes needs it

    from instep.config.file import templates

    return [*templates(), *FilesCompleter()(prefix)]


def _with_advice(error: Callable[[str], NoReturn], instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    def say(word: str) -> str:
        name = word.lstrip("-").replace("-", "_").partition("=")[0]
        other = instead.get(OTHER_NAMES.get(name, name))
        return f"{name} is called {other} here" if other else advice(word, "--{}")

    def explain(message: str) -> NoReturn:
        _, found, words = message.partition("unrecognized arguments: ")
        known = [say(word) for word in words.split() if word.startswith("--")] if found else []
        error("; ".join((message, *known)))

    return explain
