"""Describe the checkpoints in a folder by plain dicts, for the command line.

Importing this module imports torch, so commands import it only when they need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.checkpoint import CheckpointInfo, CheckpointStore, names
from instep.checkpoint.files import Files
from instep.checkpoint.lineage import Line
from instep.checkpoint.scan import Broken, list_checkpoints
from instep.utils.process_id import is_gone
from instep.utils.untrusted_files import LEASE_BYTES, parse_object


def describe(
    store: CheckpointStore,
    found: list[CheckpointInfo | Broken],
    leftovers: list[tuple[Path, bool | None]],
    verify: bool = False,
) -> list[dict[str, Any]]:
    """Describe the checkpoints of a folder, newest first, then the folders of unfinished saves and deletions.

    The role of a checkpoint is "newest" if a run would resume from it. It is "given up" if the run went back to an
    earlier checkpoint, and continued from there to the newest one. It is "another run" if the newest checkpoint does
    not continue the run that saved this one. Other checkpoints have no role (None).

    Args:
        store: store of the folder.
        found: the folder's checkpoints, intact and broken.
        leftovers: folders of unfinished saves and deletions; for each, whether its process has ended (None: unknown).
        verify: whether to compare the checksums of all bytes; otherwise only the sizes of files are compared.
    """
    roles = _roles(found)
    entries = [{**_entry(what, store.files), "role": roles.get(what.path)} for what in found]
    if verify:
        for what, entry in zip(found, entries, strict=True):
            if isinstance(what, CheckpointInfo) and (problems := store.verify(what.path)):
                entry |= {"state": "broken", "note": "; ".join(problems)}
            elif isinstance(what, CheckpointInfo):
                entry["state"] = "verified"
    return [*entries, *(_leftover(path, gone, store.files) for path, gone in leftovers)]


def state_of(entry: dict[str, Any]) -> str:
    """Format role, state and note of a dict from `describe` as text.

    Example:
        >>> state_of({"role": "newest", "state": "complete", "note": ""})
        'newest, complete'
    """
    state = ", ".join(filter(None, (entry.get("role"), entry["state"])))
    return state + (f": {entry['note']}" if entry["note"] else "")


def _roles(found: list[CheckpointInfo | Broken]) -> dict[Path, str]:
    """Return the role ("newest", "given up" or "another run") of each checkpoint that has one, by path."""
    whole = [what for what in found if isinstance(what, CheckpointInfo)]
    newest = next((info for info in whole if info.kind not in ("weights", "exception")), None)
    if newest is None:
        return {}
    line, roles = Line.of(newest.manifest), {newest.path: "newest"}
    for info in whole:
        if not line.has(info.manifest.run_id, info.step):
            roles[info.path] = "given up" if line.knows(info.manifest.run_id) else "another run"
    return roles


def checkpoints(root: Path, verify: bool = False) -> list[dict[str, Any]]:
    """Describe the checkpoints of the folder `root`; see `describe`."""
    store = CheckpointStore(root)
    return describe(store, list_checkpoints(root), store.files.leftovers(root), verify)


def holder(root: Path, files: Files) -> dict[str, Any] | None:
    """Describe the run that holds the lease of a folder; only this run may save there. None if no run holds it."""
    for path in sorted(root.glob(".lease-*"), reverse=True)[:1]:
        try:
            content = parse_object(files.read(path, LEASE_BYTES))
            if not content["released"]:
                fields = ("run_id", "host", "pid", "command", "since")
                return {**{key: content.get(key) for key in fields}, "dead": is_gone(str(content.get("owner")))}
        except (OSError, ValueError, KeyError, TypeError):  # the lease is unreadable, or was removed in the meantime
            continue
    return None


def sizes(folder: Path, files: Files) -> dict[str, int]:
    """Return the size in bytes of every file of a checkpoint, including the manifest; {} if the folder is gone."""
    try:
        return files.sizes(folder)
    except FileNotFoundError:  # the folder was renamed or deleted in the meantime
        return {}


def _entry(what: CheckpointInfo | Broken, files: Files) -> dict[str, Any]:
    bytes_of = sizes(what.path, files)
    if not isinstance(what, CheckpointInfo):
        step, attempt = names.step_of(what.path.name) or (None, None)
        entry = {"name": what.path.name, "step": step, "attempt": attempt, "bytes": sum(bytes_of.values())}
        return {**entry, "state": "broken", "note": what.problem}
    manifest = what.manifest
    wrong = [
        f"{name} has {bytes_of[name]:,} bytes instead of {record.bytes:,}" if name in bytes_of else f"{name} is missing"
        for name, record in manifest.files.items()
        if bytes_of.get(name) != record.bytes
    ]
    return {
        "name": what.path.name,
        "step": what.step,
        "attempt": what.attempt,
        "kind": what.kind,
        **{key: manifest.info.get(key) for key in ("epoch", "monitor", "mode", "score")},
        "bytes": sum(bytes_of.values()),
        "created": manifest.created,
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "state": "broken" if wrong else "complete",
        "note": "; ".join(wrong),
    }


def _leftover(path: Path, gone: bool | None, files: Files) -> dict[str, Any]:
    entry = {"name": path.name, "bytes": sum(sizes(path, files).values())}
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
