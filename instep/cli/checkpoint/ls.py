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
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.cli import output
from instep.utils.process_id import is_gone
from instep.utils.untrusted_files import LEASE_BYTES, parse_object

if TYPE_CHECKING:
    from instep.checkpoint import CheckpointInfo
    from instep.checkpoint.files import Files
    from instep.checkpoint.scan import Broken
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
    files = folder.store.files
    return {
        "folder": str(folder.store.root),
        "lease": _lease(folder.store.root, files),
        "checkpoints": [
            *(_entry(what, files) for what in folder.found),
            *(_leftover(path, gone, files) for path, gone in folder.leftovers),
        ],
    }


def _lease(root: Path, files: Files) -> dict[str, Any] | None:
    """Find the run that holds the folder; None where none does."""
    for path in sorted(root.glob(".lease-*"), reverse=True)[:1]:
        try:
            content = parse_object(files.read(path, LEASE_BYTES))
            if not content["released"]:
                fields = ("run_id", "host", "pid", "command", "since")
                return {**{key: content.get(key) for key in fields}, "dead": is_gone(str(content.get("owner")))}
        except (OSError, ValueError, KeyError, TypeError):  # it changes at any moment, or is of another version
            continue
    return None


def _entry(what: CheckpointInfo | Broken, files: Files) -> dict[str, Any]:
    from instep.checkpoint import CheckpointInfo, names  # late: loads torch
    from instep.cli.checkpoint import targets

    sizes = targets.sizes(what.path, files)
    if not isinstance(what, CheckpointInfo):
        step, attempt = names.step_of(what.path.name) or (None, None)
        entry = {"name": what.path.name, "step": step, "attempt": attempt, "bytes": sum(sizes.values())}
        return {**entry, "state": "broken", "note": what.problem}
    manifest = what.manifest
    wrong = [
        f"{name} has {sizes[name]:,} bytes instead of {record.bytes:,}" if name in sizes else f"{name} is missing"
        for name, record in manifest.files.items()
        if sizes.get(name) != record.bytes
    ]
    return {
        "name": what.path.name,
        "step": what.step,
        "attempt": what.attempt,
        "kind": what.kind,
        **{key: manifest.info.get(key) for key in ("epoch", "monitor", "mode", "score")},
        "bytes": sum(sizes.values()),
        "created": manifest.created,
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "state": "broken" if wrong else "complete",
        "note": "; ".join(wrong),
    }


def _leftover(path: Path, gone: bool | None, files: Files) -> dict[str, Any]:
    from instep.checkpoint import names  # late: loads torch
    from instep.cli.checkpoint import targets

    entry = {"name": path.name, "bytes": sum(targets.sizes(path, files).values())}
    if path.name.startswith(names.DELETING):
        return {**entry, "state": "deleted", "note": "the next save here removes what is left of it"}
    final, _, owner = path.name.removeprefix(names.SAVING).rpartition("@")
    step, attempt = names.step_of(final or path.name) or (None, None)
    who = f"process {owner}" if final else "a process"
    state, note = {
        False: ("saving", f"{who} is writing it"),
        True: ("dead", f"{who} ended before its save did; the next save here removes it"),
        None: ("unknown", f"{who} on another host is writing it, or was"),
    }[gone]
    return {**entry, "step": step, "attempt": attempt, "state": state, "note": note}


def _print(folder: dict[str, Any], number: int) -> None:
    if number:
        output.say()
    output.say(folder["folder"])
    lease = folder["lease"]
    if lease is not None:
        ended = " (it ended without giving the folder back)" if lease["dead"] else ""
        output.say(f"held by run {lease['run_id']}: {lease['host']}, pid {lease['pid']}, {lease['command']}{ended}")
    rows = []
    for entry in folder["checkpoints"]:
        score, created = entry.get("score"), entry.get("created")
        rows.append(
            (
                *(entry.get(key) for key in ("name", "step", "attempt", "kind", "epoch")),
                None if score is None else f"{entry['monitor']}={score:.6g}",
                output.size(entry["bytes"]),
                None if created is None else output.age(created),
                entry["state"] + (f": {entry['note']}" if entry["note"] else ""),
            )
        )
    headers = ("checkpoint", "step", "attempt", "kind", "epoch", "score", "size", "created", "state")
    output.table(headers, rows, right=("step", "attempt", "epoch", "size"))
    broken = [f"{folder['folder']}/{entry['name']}" for entry in folder["checkpoints"] if entry["state"] == "broken"]
    if broken and "://" not in folder["folder"]:
        output.say(f"to clear what is broken: {shlex.join(['rm', '-r', *broken])}")
