"""List the checkpoints at PATH and below, the newest first.

Also says what is broken and why, which saves are going on or were cut short, and which run holds the folder. Sizes are
compared with what was written; `verify` reads every byte.

Examples:
  instep checkpoint ls .                                  all runs below this folder
  instep checkpoint ls instep_runs/version_0              one run
  instep checkpoint ls s3://bucket/run --json | jq .
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli import output

if TYPE_CHECKING:
    from instep.checkpoint import CheckpointInfo
    from instep.checkpoint.catalog import Broken
    from instep.cli.checkpoint.targets import Folder


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="a checkpoint, run, or folder of runs")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print the list; 1 where something in it is broken."""
    from instep.cli.checkpoint.targets import find  # late: loads torch

    folders = [_describe(folder) for folder in find(args.path)]
    if args.json:
        output.say_json({"folders": folders})
    else:
        for number, folder in enumerate(folders):
            _print(folder, number)
    return int(any(entry["state"] == "broken" for folder in folders for entry in folder["checkpoints"]))


def _describe(folder: Folder) -> dict[str, Any]:
    return {
        "folder": str(folder.store.root),
        "checkpoints": [*map(_entry, folder.found), *(_hidden(folder.store.root, name) for name in folder.hidden)],
    }


def _entry(what: CheckpointInfo | Broken) -> dict[str, Any]:
    from instep.checkpoint import CheckpointInfo, names  # late: loads torch

    if not isinstance(what, CheckpointInfo):
        step, attempt = names.step_of(what.path.name) or (None, None)
        return {
            "name": what.path.name,
            "step": step,
            "attempt": attempt,
            "state": "broken",
            "note": what.problem,
            "bytes": _bytes_in(what.path),
        }
    manifest = what.manifest
    info = dict(manifest.info)
    wrong = [problem for name, record in manifest.files.items() if (problem := _size_problem(what.path, name, record))]
    return {
        "name": what.path.name,
        "step": what.step,
        "attempt": what.attempt,
        "kind": what.kind,
        **{key: info.get(key) for key in ("epoch", "monitor", "mode", "score")},
        "bytes": sum(record.bytes for record in manifest.files.values()),
        "created": manifest.created,
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "state": "broken" if wrong else "complete",
        "note": "; ".join(wrong),
    }


def _size_problem(folder: Path, name: str, record: Any) -> str | None:
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return f"{name} {'is missing' if isinstance(error, FileNotFoundError) else error.strerror}"
    return None if size == record.bytes else f"{name} has {size:,} bytes instead of {record.bytes:,}"


def _hidden(root: Path, name: str) -> dict[str, Any]:
    from instep.checkpoint import names  # late: loads torch
    from instep.checkpoint.owner import is_gone

    entry: dict[str, Any] = {"name": name, "bytes": _bytes_in(root / name)}
    if name.startswith(names.DELETING):
        return {**entry, "state": "deleting", "note": "given up; the next save removes what is left of it"}
    owner = names.saving_owner(name)
    final = name.removeprefix(names.SAVING).rpartition("@")[0]
    step, attempt = names.step_of(final) or (None, None)
    gone = is_gone(owner)
    state = "saving" if gone is False else "dead" if gone else "unknown"
    notes = {
        "saving": f"process {owner} is writing it",
        "dead": f"process {owner} ended before the save did; the next save here removes it",
        "unknown": f"process {owner} of another host is writing it, or was",
    }
    return {**entry, "step": step, "attempt": attempt, "state": state, "note": notes[state]}


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # a save that is going on renames its files
    return total


def _print(folder: dict[str, Any], number: int) -> None:
    if number:
        output.say()
    output.say(folder["folder"])
    rows = []
    for entry in folder["checkpoints"]:
        score = entry.get("score")
        rows.append(
            (
                entry["name"],
                entry.get("step"),
                entry.get("attempt"),
                entry.get("kind"),
                entry.get("epoch"),
                None if score is None else f"{entry['monitor']}={score:.6g}",
                output.size(entry["bytes"]),
                output.age(entry["created"]) if "created" in entry else None,
                entry["state"] + (f": {entry['note']}" if entry["note"] else ""),
            )
        )
    headers = ("checkpoint", "step", "attempt", "kind", "epoch", "score", "size", "created", "state")
    output.table(headers, rows, right=("step", "attempt", "epoch", "size"))
