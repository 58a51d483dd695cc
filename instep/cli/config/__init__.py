"""Ask about this machine and write the config file that `instep launch` uses; `instep config default` does not ask.

It is one YAML file, $XDG_CONFIG_HOME/instep/config.yaml (~/.config/instep/config.yaml) unless INSTEP_CONFIG_FILE or
`--config FILE` says otherwise. An empty answer takes what stands in brackets: what an existing file says, if any.

  instep config default     write it without questions
  instep config update      change settings, or take over a file of Accelerate
  instep config show        every setting, its value and where that comes from
  instep config validate    check files
  instep config templates   files that come with instep

Examples:
  instep config
  instep config --config runs/two_machines.yaml
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from instep.cli import output
from instep.cli.config.files import add_config, read_settings, target, use, write_file
from instep.config.settings import check
from instep.errors import SettingError, UsageError

_ASKED = (
    "accelerator", "devices", "num_processes", "num_nodes", "rdzv_endpoint", "node_rank", "master_addr", "master_port",
    "strategy", "strategy_options", "precision", "accumulate_grad_batches", "hang_timeout_s", "log_dir",
)  # fmt: skip
_MICRO_BATCHES = "Micro-batches per optimizer step"
_HANG = "After how many seconds without a step does a rank hang? 0 for never"
_LOG_DIR = "Folder for what each rank prints; - for none"
_COMMON_STRATEGIES = "auto, ddp, fsdp, hsdp, tp, cp, pp, deepspeed_stage_2, deepspeed_stage_3, xla ..."
_RESTARTS = "How often may the job start over after a failure?"
_PRECISIONS = "32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, 64-true, fp8"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, and write the file."""
    from rich.prompt import Confirm  # late: only questions need it

    from instep.cli.config.files import found, kinds  # late: loads torch

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


def _answers(now: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    here = f"Which devices? Here are {', '.join(kinds)}"
    values = {"accelerator": _ask("accelerator", here, now["accelerator"])}
    count = now["devices"] if values["accelerator"] == now["accelerator"] else 1
    values["devices"] = _ask("devices", "How many processes on each machine, or indices as 0,1", count)
    values["num_nodes"] = _ask(
        "num_nodes", "How many machines? MIN:MAX lets a job go on with less", now.get("num_nodes", 1)
    )
    if values["num_nodes"] != 1:
        elastic = ":" in str(values["num_nodes"])
        if elastic:
            values["rdzv_endpoint"] = _ask(
                "rdzv_endpoint", "HOST:PORT on one of them where all can meet", now.get("rdzv_endpoint")
            )
        else:
            values["node_rank"] = _ask("node_rank", "Which of them is this one? From 0", now.get("node_rank", 0))
            values["master_addr"] = _ask("master_addr", "Address of machine 0", now.get("master_addr"))
            values["master_port"] = _ask("master_port", "A free port there", now.get("master_port", 29500))
        values["max_restarts"] = _ask("max_restarts", _RESTARTS, now.get("max_restarts", 3))
    values["strategy"] = _ask("strategy", f"How is the model spread? {_COMMON_STRATEGIES}", now.get("strategy", "auto"))
    if values["strategy"] != "auto":
        options = now.get("strategy_options", "") if values["strategy"] == now.get("strategy") else ""
        question = f"Arguments of {values['strategy']}, as name=value,name=value"
        options = _ask("strategy_options", question, options)
        values |= {"strategy_options": options} if options else {}
    values["precision"] = _ask("precision", f"Precision? {_PRECISIONS}", now.get("precision", "32-true"))
    values["accumulate_grad_batches"] = _ask(
        "accumulate_grad_batches", _MICRO_BATCHES, now.get("accumulate_grad_batches", 1)
    )
    timeout = _ask("hang_timeout_s", _HANG, now.get("hang_timeout_s", 0), none="0")
    values |= {"hang_timeout_s": timeout} if timeout else {}
    folder = _ask("log_dir", _LOG_DIR, now.get("log_dir", "-"), none="-")
    return values | ({"log_dir": folder} if folder else {})


def _ask(name: str, question: str, default: Any, none: str = "") -> Any:
    """One answer, asked again until it is right; None for the word for none."""
    from rich.prompt import Prompt  # late, as above

    if isinstance(default, list):
        default = ",".join(map(str, default))
    elif isinstance(default, dict):
        default = json.dumps(default)
    while True:
        answer = Prompt.ask(question, default=... if default is None else str(default))
        if answer == none and (none or default == ""):
            return None
        if not answer:
            continue  # there is no default
        try:
            return check({name: answer}, {})[name]
        except SettingError as error:
            output.say(f"  {error}")
