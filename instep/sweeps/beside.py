"""Compare two runs line by line: how they ended, their settings, their code and their metrics."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.runs.entries import Entry
from instep.runs.facts import number
from instep.runs.naming import value
from instep.runs.status import own
from instep.utils.untrusted_files import LEASE_BYTES, parse_object, read_regular

# Limits for the patch of uncommitted changes: bytes that are read, lines that are compared, lines that are shown.
PATCH_BYTES, COMPARED, _LINES = 2**18, 2000, 400

Row = tuple[str, str, str, str]
"""A row of a comparison: name, text of the first run, text of the second, and "≠" where they differ."""


def code_of(folder: Path) -> dict[str, str]:
    """Read what a logger with `save_code=True` recorded about a run's code: commit, branch, script and patch.

    Returns:
        Texts by name, with "patch" as the last name; empty if the run has no readable record of its code.
    """
    code: dict[str, str] = {}
    with suppress(OSError, ValueError):
        if own(folder / "git.json", folder):
            said = parse_object(read_regular(folder / "git.json", LEASE_BYTES))
            code = {key: str(said[key])[:500] for key in ("commit", "branch", "remote", "script") if said.get(key)}
            code["uncommitted"] = "changes" if said.get("is_dirty") is True else "none"
    with suppress(OSError):
        if code and own(folder / "git.patch", folder) and os.path.lexists(folder / "git.patch"):
            code["patch"] = read_regular(folder / "git.patch", PATCH_BYTES).decode("utf-8", "replace")
    return code


def settings(one: Entry, other: Entry, same: bool) -> list[Row]:
    """Return rows of the hyperparameters in which two runs differ; with `same`, also of equal hyperparameters."""
    rows = []
    for key in dict.fromkeys((*one.params, *other.params)):
        a, b = (entry.params.get(key) for entry in (one, other))
        differ = repr(a) != repr(b)
        if differ or same:
            rows.append((key, *("" if each is None else value(each) for each in (a, b)), "≠" if differ else ""))
    return rows or [("all the same", "", "", "")]


def facts(one: Entry, other: Entry, codes: tuple[dict[str, str], dict[str, str]]) -> list[Row]:
    """Return rows about how two runs ended, and about their code."""
    parts = [
        ("state", one.outcome, other.outcome),
        ("why", one.why, other.why),
        ("step", _text(one.run.status.step), _text(other.run.status.step)),
        ("tags", " ".join(one.run.label.tags), " ".join(other.run.label.tags)),
        ("note", one.run.label.note, other.run.label.note),
        *((key, codes[0].get(key, ""), codes[1].get(key, "")) for key in dict.fromkeys((*codes[0], *codes[1]))),
    ]
    return [(key, a, b, "" if a == b else "≠") for key, a, b in parts if (a or b) and key != "patch"]


def metrics(one: Entry, other: Entry) -> list[Row]:
    """Return rows of the last value of each metric, with the difference of the second run from the first."""
    names = [name for name in dict.fromkeys((*one.ends, *other.ends)) if name not in ("epoch", "hp_metric")]
    rows = []
    for name in names[:200]:
        a, b = (entry.ends[name].last if name in entry.ends else None for entry in (one, other))
        rows.append((name, number(a), number(b), "" if a is None or b is None else f"{b - a:+.3g}"))
    return rows


def patches(one: dict[str, str], other: dict[str, str]) -> str:
    """Return the difference between two runs' uncommitted changes as a unified diff; "" if they are equal.

    Of long changes only the first 2,000 lines are compared, and the returned text says this.
    """
    before, after = (code.get("patch", "").splitlines() for code in (one, other))
    lines = list(difflib.unified_diff(before[:COMPARED], after[:COMPARED], "first", "second", lineterm="", n=1))
    more = [f"and {len(lines) - _LINES:,} more lines"] * (len(lines) > _LINES)
    more += [f"Only the first {COMPARED:,} lines of each were compared."] * (
        before != after and max(len(before), len(after)) > COMPARED
    )
    return "\n".join([*lines[:_LINES], *more])


def _text(of: Any) -> str:
    return "" if of is None else f"{of:,}"
