"""`instep config` and its sub-commands, which write, change, show and check the config file of `instep launch`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.cli import output
from instep.config.file import (
    FILE_VARIABLE,
    NO_FILE,
    TEMPLATES,
    default_file,
    find_file,
    read_file,
    read_settings,
    templates,
    write_file,
)
from instep.config.layers import Launch, put, resolve
from instep.config.settings import DICTS, NAMES, about, advice, check, choices, schema, translate
from instep.errors import SettingError, UsageError, one_of
from instep.utils.redact import hide
from instep.utils.untrusted_files import clean

_ASKED = (
    "accelerator", "devices", "num_processes", "num_nodes", "rdzv_endpoint", "node_rank", "master_addr", "master_port",
    "strategy", "strategy_options", "precision", "accumulate_grad_batches", "hang_timeout_s", "log_dir",
)  # fmt: skip
_COMMON_STRATEGIES = "auto, ddp, fsdp, hsdp, tp, cp, pp, deepspeed_stage_2, deepspeed_stage_3, xla ..."
_PRECISIONS = "32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, 64-true, fp8"
CONFIG_HELP = "the file (default: INSTEP_CONFIG_FILE, else ~/.config/instep/config.yaml)"


class Config:
    """Ask about this machine and write the config file that `instep launch` uses; `instep config default` does not ask.

    The config file is YAML: $XDG_CONFIG_HOME/instep/config.yaml (~/.config/instep/config.yaml), unless
    INSTEP_CONFIG_FILE or `--config FILE` names another. An empty answer means the value in brackets: the one
    in the existing file, else the default.

      instep config default     write it without questions
      instep config update      change settings, or take over a file of Accelerate
      instep config show        every setting, its value and where that comes from
      instep config validate    check files
      instep config templates   files that come with instep

    Examples:
      instep config
      instep config --config runs/two_machines.yaml
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments to the parser."""
        add_config(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Ask the questions, and write the config file."""
        from rich.prompt import Confirm  # imported late, since only questions need it

        path = target(args.config)
        try:
            if path.exists() and not Confirm.ask(f"{path} exists. Change it?", default=False):
                return 0
            before = read_settings(path) if path.exists() else {}
            values = _answers({**found(), **before}, kinds())
        except EOFError:
            raise UsageError(
                "there is nobody to answer: `instep config default NAME=VALUE ...` writes the file without questions"
            ) from None
        write_file(path, {**{name: value for name, value in before.items() if name not in _ASKED}, **values})
        output.say(f"wrote {path}; {use(path)}")
        return 0


class Default:
    """Write a config file without questions: the devices of this machine, and the settings given as NAME=VALUE.

    Examples:
      instep config default
      instep config default --config runs/debug.yaml precision=bf16-mixed strategy=fsdp
      instep launch train.py                      # then uses it
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments to the parser."""
        add_config(parser)
        add = parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings to put there")
        add.completer = complete_setting  # pyright: ignore[reportAttributeAccessIssue]
        parser.add_argument("--force", action="store_true", help="overwrite a file that is there")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Write the config file."""
        path, said = target(args.config), assignments(args.settings)
        if path.exists() and not args.force:
            raise UsageError(f"{path} exists: `instep config update NAME=VALUE` changes it, `--force` overwrites it")

        write_file(path, laid_over(found(), said))
        output.say(f"wrote {path}; {use(path)}")
        return 0


class Update:
    """Change settings of the config file, or copy the settings of another file, which may be one of Accelerate.

    New members of env, rdzv_conf and strategy_options are added to the existing members. Settings of Accelerate get
    instep's names; for a setting that instep does not have, the command prints what replaces it.

    Examples:
      instep config update precision=bf16-mixed max_restarts=3
      instep config update env.NCCL_DEBUG=WARN strategy_options.cpu_offload=true
      instep config update --unset strategy strategy_options env.NCCL_DEBUG
      instep config update --from ~/.cache/huggingface/accelerate/default_config.yaml
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments to the parser."""
        add_config(parser)
        add = parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="settings to change")
        add.completer = complete_setting  # pyright: ignore[reportAttributeAccessIssue]
        parser.add_argument("--unset", nargs="+", metavar="NAME", default=[], help="settings to leave open again")
        parser.add_argument("--from", dest="other", metavar="FILE", help="a file whose settings are taken over first")
        parser.set_defaults(fail=parser.error)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Change the config file."""
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
            sys.stderr.write(clean(f"instep: {name} is gone: it was about what has changed\n"))
        for name, member in map(split, args.unset):
            if member:
                values.get(name, {}).pop(member, None)
            else:
                values.pop(name, None)
        write_file(path, values)
        output.say(f"wrote {path}, {output.count(len(values), 'setting')}")
        for text in left:
            sys.stderr.write(clean(f"instep: not taken over: {text}\n"))
        return 0


class Show:
    """Show every setting of a launch: its value, the source of the value, and its meaning.

    An option of `instep launch` counts more than the config file, the file more than the variable INSTEP_NAME, and the
    variable more than the default.

    Examples:
      instep config show
      instep config show --config fsdp
      INSTEP_PRECISION=bf16-mixed instep config show --json
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments to the parser."""
        parser.add_argument("--config", metavar="FILE", help=f"{CONFIG_HELP}, or a template")
        parser.add_argument("--json", action="store_true", help="for programs")

    @staticmethod
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


class Validate:
    """Check the names, values and contradictions in config files; the exit code is 1 if something is wrong.

    Examples:
      instep config validate
      instep config validate runs/*.yaml
      instep config validate --schema > instep.schema.json      # for an editor
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments to the parser."""
        parser.add_argument(
            "files", nargs="*", metavar="FILE", help="files or templates (default: the one that launches use)"
        )
        parser.add_argument("--config", metavar="FILE", action="append", help="the same")
        parser.add_argument("--schema", action="store_true", help="print the JSON schema instead")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Check each file, and print what is wrong."""
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


class Templates:
    """List the config files that come with instep: use one by its name, or copy it and change the copy.

    Examples:
      instep config templates
      instep launch --config fsdp train.py
      instep config templates fsdp > fsdp.yaml                  # to change it
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments to the parser."""
        name = parser.add_argument("name", nargs="?", help="print this one")
        name.completer = lambda **_: list(templates())  # pyright: ignore[reportAttributeAccessIssue]
        parser.add_argument("--json", action="store_true", help="for programs")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """List the templates, or print one."""
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


def _answers(now: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}

    def ask(name: str, question: str, default: Any = None, none: str = "") -> Any:
        values[name] = _ask(name, question, now.get(name, default), none)
        return values[name]

    before = now["accelerator"], now.get("strategy")
    if ask("accelerator", f"Which devices? Here are {', '.join(kinds)}") != before[0]:
        now = {**now, "devices": 1}
    ask("devices", "How many processes on each machine, or indices as 0,1")
    nodes = ask("num_nodes", "How many machines? MIN:MAX lets a job go on with less", 1)
    if ":" in str(nodes):
        ask("rdzv_endpoint", "HOST:PORT on one of them where all can meet")
    elif nodes != 1:
        ask("node_rank", "Which of them is this one? From 0", 0)
        ask("master_addr", "Address of machine 0")
        ask("master_port", "A free port there", 29500)
    if nodes != 1:
        ask("max_restarts", "How often may the job start over after a failure?", 3)
    strategy = ask("strategy", f"How is the model spread? {_COMMON_STRATEGIES}", "auto")
    if strategy != "auto":
        now = now if strategy == before[1] else {**now, "strategy_options": ""}
        ask("strategy_options", f"Arguments of {strategy}, as name=value,name=value", "")
    ask("precision", f"Precision? {_PRECISIONS}", "32-true")
    ask("accumulate_grad_batches", "Micro-batches per optimizer step", 1)
    ask("hang_timeout_s", "After how many seconds without a step does a rank hang? 0 for never", 0, none="0")
    ask("log_dir", "Folder for what each rank prints; - for none", "-", none="-")
    return {name: value for name, value in values.items() if value not in (None, {})}


def _ask(name: str, question: str, default: Any, none: str = "") -> Any:
    """Ask a question until the answer is valid; return None if the answer is `none`, the text for "no value"."""
    from rich.prompt import Prompt  # imported late, since it is slow to import

    if isinstance(default, list | tuple):
        default = ",".join(map(str, default))
    elif isinstance(default, dict):
        default = json.dumps(default)
    while True:
        answer = Prompt.ask(question, default=... if default is None else str(default))
        if answer == none and (none or default == ""):
            return None
        if not answer:
            continue  # the setting has no default, so ask again
        try:
            return check({name: answer}, {})[name]
        except SettingError as error:
            output.say(f"  {error}")


def as_json(launch: Launch) -> dict[str, Any]:
    """Return every setting of a launch with its value and the value's source."""
    return {
        name: {"value": hide(getattr(launch.settings, name)), "source": launch.sources.get(name, "default")}
        for name in NAMES
    }


def print_settings(launch: Launch, explain: bool = True) -> None:
    """Print a table of the settings of a launch."""
    rows = [(name, _text(entry["value"]), entry["source"], about(name).text) for name, entry in as_json(launch).items()]
    columns = ("setting", "value", "from", "what it is")[: 4 if explain else 3]
    output.table(columns, [row[: len(columns)] for row in rows])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option `--config` to a command that writes the config file."""
    parser.add_argument("--config", metavar="FILE", help=CONFIG_HELP)


def target(config: str | None) -> Path:
    """Return the path of the config file that a command writes."""
    config = config or os.environ.get(FILE_VARIABLE, "").strip()
    if config == NO_FILE:
        raise UsageError(f"{NO_FILE!r} means no config file: name one by --config FILE")
    # Path.expanduser would raise if there is no home folder
    return Path(os.path.expanduser(config)) if config else default_file()


def use(path: Path) -> str:
    """Return a sentence that says how to launch with a config file."""
    return (
        "`instep launch SCRIPT` uses it"
        if path == default_file()
        else f"`instep launch --config {path} SCRIPT` uses it"
    )


def assignments(words: Iterable[str]) -> dict[str, Any]:
    """Read and check settings given as words `NAME=VALUE`; `NAME.MEMBER=VALUE` sets a member of a mapping.

    Raises:
        SettingError: a word does not have this form, or its value is wrong.

    Example:
        >>> assignments(["env.A=1", "env=B=2", "max_restarts=3"])
        {'env': {'A': '1', 'B': '2'}, 'max_restarts': 3}
    """
    values: dict[str, Any] = {}
    for word in words:
        path, sign, value = word.partition("=")
        name, member = split(path)
        if not sign:
            raise SettingError(f"{word!r}: expected NAME=VALUE", field="setting", got=word)
        given = value if not member else {member: value} if "," in value else f"{member}={value}"
        checked = check({name: given}, {})[name]
        values[name] = {**values.get(name, {}), **checked} if name in DICTS else checked
    return values


def split(path: str) -> tuple[str, str]:
    """Split a word `NAME.MEMBER` into the name of a setting and the name of its member; the member may be missing.

    Raises:
        SettingError: there is no setting of this name, or it has no members.
    """
    name, _, member = path.partition(".")
    name = name.replace("-", "_")
    if name not in NAMES or (member and name not in DICTS):
        problem = f"{name} has no members; {', '.join(DICTS)} have" if name in NAMES else advice(name)
        raise SettingError(f"{path!r}: {problem}", field="setting", got=path)
    return name, member


def laid_over(values: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge new settings over old ones, in the same way as a launch merges the settings of its sources."""
    merged = dict(values)
    put(new, dict.fromkeys(new, "here"), merged, dict.fromkeys(merged, "there"))
    return merged


def complete_setting(prefix: str, **_: Any) -> list[str]:
    """List the completions of NAME=VALUE for a shell."""
    name, sign = prefix.partition("=")[:2]
    return [f"{name}={value}" for value in choices(name)] if sign else [f"{name}=" for name in NAMES]


def found() -> dict[str, Any]:
    """Return the kind and number of this machine's devices; the number is 1 for a CPU."""
    from instep.state import find_device_kind  # imported late, since it loads torch

    kind = find_device_kind("auto")
    return {"accelerator": kind.name, "devices": 1 if kind.name == "cpu" else kind.count()}


def kinds() -> list[str]:
    """Return the kinds of device on this machine, the best first."""
    from instep.state import DEVICE_KINDS  # imported late, since it loads torch

    return [name for name, kind in DEVICE_KINDS.items() if kind.count()]
