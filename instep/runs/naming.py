"""Name runs that no user has named, by the settings that differ from other runs in the same folder."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from instep.loggers.folders import RUNS, number_of
from instep.runs.folder import Run
from instep.utils.untrusted_files import clean

Params = Mapping[str, bool | int | float | str]
_MOST, _LONG = 4, 24  # maximum number of settings in a name, and of characters in a setting's value
_OPTION = re.compile(r"(?:--?)?([A-Za-z_][\w./-]{0,63})=(.{0,200})", re.DOTALL)


def call(runs: Sequence[tuple[Run, Params]]) -> list[str]:
    """Name runs by their label, by their folder if it is not `version_N`, or by the settings that differ between runs.

    Only settings of runs in the same folder (neighbors) are compared. A run without neighbors gets the name of the
    nearest folder above it that is neither a `version_N` nor a usual name, such as `lightning_logs`. If no setting
    differs, the name is the program and the time of its start. If several runs would have the same name, the number of
    the folder is added to each.

    Args:
        runs: the runs, each with its hyperparameters.
    """
    beside: dict[Path, list[Params]] = {}
    for run, params in runs:
        beside.setdefault(run.folder.parent, []).append(params)
    differ = {folder: differing(all_params)[:_MOST] for folder, all_params in beside.items()}
    lonely = {folder for folder, all_params in beside.items() if len(all_params) == 1}
    names = [_name(run, params, differ[run.folder.parent], run.folder.parent in lonely) for run, params in runs]
    for tell_apart in (_with_number, lambda name, run: f"{name} ({run.name})"):
        seen = Counter(names)
        names = [tell_apart(name, run) if seen[name] > 1 else name for name, (run, _) in zip(names, runs, strict=True)]
    return names


def differing(all_params: Sequence[Params]) -> list[str]:
    """List the hyperparameters that differ between runs, in the order of the first run that has them."""
    keys = dict.fromkeys(key for params in all_params for key in params)
    missing = object()
    return [key for key in keys if len({repr(params.get(key, missing)) for params in all_params}) > 1]


def value(of: Any) -> str:
    """Format a hyperparameter briefly.

    Example:
        >>> value(0.1), value(3e-5), value(True), value("adam")
        ('0.1', '3e-05', 'true', 'adam')
    """
    if isinstance(of, bool):
        return str(of).lower()
    text = f"{of:.6g}" if isinstance(of, float) else clean(str(of), "")
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def short(key: str, keys: Sequence[str]) -> str:
    """Return the last part of a hyperparameter's name; return the whole name if another one has the same last part.

    Example:
        >>> keys = ["model/width", "lr", "a/size", "b/size"]
        >>> [short(key, keys) for key in keys]
        ['width', 'lr', 'a/size', 'b/size']
    """
    last = key.rpartition("/")[2]
    alone = sum(other.rpartition("/")[2] == last for other in keys) == 1
    return clean(last if alone and last else key, "")


def options_of(command: Any) -> dict[str, bool | int | float | str]:
    """Read the options of a command, which tell runs apart if their modules save no hyperparameters.

    Example:
        >>> options_of(["python", "train.py", "--lr", "0.1", "--fast", "model.width=8"])
        {'lr': 0.1, 'fast': True, 'model.width': 8}
    """
    words = [str(word) for word in command] if isinstance(command, list) else []
    found: dict[str, bool | int | float | str] = {}
    for word, after in pairwise([*words, "-"]):
        if match := _OPTION.fullmatch(word):
            found[match[1]] = _parsed(match[2])
        elif re.fullmatch(r"--[A-Za-z_][\w./-]{0,63}", word):
            alone = re.match(r"-[^\d.]|-$", after) or _OPTION.fullmatch(after)
            found[word[2:]] = True if alone else _parsed(after[:200])
    return {clean(key, ""): told for key, told in found.items()}


def _parsed(text: str) -> bool | int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return clean(text, "")


def _name(run: Run, params: Params, differ: Sequence[str], alone: bool) -> str:
    if run.label.name:
        return run.label.name
    if number_of(run.folder.name) is None:
        return clean(run.folder.name, "")
    said = " ".join(f"{short(key, differ)}={value(params[key])}" for key in differ if key in params)
    return said or (_place(run.folder) if alone else "") or _start(run.status.said) or run.name


def _place(folder: Path) -> str:
    """Return the name of the nearest folder above a run, except `version_N` and usual names; "" if there is none."""
    above = (name for name in reversed(folder.parts[1:-1]) if number_of(name) is None)
    return clean(next((name for name in above if name not in (RUNS, "lightning_logs")), ""), "")


def _start(said: Mapping[str, Any]) -> str:
    """Return the program's name and the time of its start; "" if they are unknown."""
    command, started = said.get("command"), said.get("started")
    words = [Path(str(word)).name for word in command] if isinstance(command, list) else []
    program = next((word for word in words if word.endswith(".py")), "instep" if "instep" in words else "")
    if not program or not isinstance(started, (int, float)) or not 0 < started < 2**33:
        return ""
    return f"{clean(program, '')} {time.strftime('%d %b %H:%M', time.localtime(started))}"


def _with_number(name: str, run: Run) -> str:
    number = number_of(run.folder.name)
    return name if number is None else f"{name} #{number}"
