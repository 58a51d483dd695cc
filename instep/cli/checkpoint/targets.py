"""What a PATH on the command line means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from instep.checkpoint import CheckpointInfo, CheckpointStore, find_checkpoint, names
from instep.checkpoint.catalog import Broken, folder_names, look
from instep.checkpoint.manifest import MANIFEST
from instep.errors import CheckpointError, CheckpointNotFoundError
from instep.utils.paths import to_path

_DEPTH = 6  # runs/<experiment>/instep_runs/version_0/checkpoints, and one more


@dataclass(frozen=True)
class Folder:
    """A folder of checkpoints, and those in it that are meant.

    Args:
        store: the folder.
        found: the newest first.
        remains: saves in progress, and what dead ones and deletions left; with whether nobody is at work there, None
            where that cannot be known from here.
    """

    store: CheckpointStore
    found: list[CheckpointInfo | Broken]
    remains: list[tuple[Path, bool | None]]


def find(path: str) -> list[Folder]:
    """The folders of checkpoints that a path means: those at it or below it, or one checkpoint alone.

    Args:
        path: a checkpoint, a folder of checkpoints, a run folder, or a folder of runs; where it can be, a URL.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
    """
    here = to_path(path).absolute()
    if not here.exists():
        here = find_checkpoint(here)  # "runs/best" for "runs/best-2"; its error says what there is
    if here.is_file():
        raise CheckpointNotFoundError(f"{here} is a file; a checkpoint is a folder", path=here)
    if (here / MANIFEST).exists() or names.step_of(here.name) is not None:
        store = CheckpointStore(here.parent)
        return [Folder(store, [what for what in look(store.root) if what.path.name == here.name], [])]
    folders = list(_below(here, _DEPTH))
    if not folders:
        raise CheckpointNotFoundError(f"there is no checkpoint in {here}, nor up to {_DEPTH} folders below it")
    return folders


def find_one(path: str) -> Path:
    """The checkpoint that a path means: itself, or the newest of the one folder of checkpoints at or below it.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: it does not say which one.
    """
    folders = find(path)
    if len(folders) > 1:
        listed = ", ".join(str(folder.store.root) for folder in folders[:5])
        raise CheckpointError(f"{path} has several folders of checkpoints ({listed}, ...); give one of them")
    found = folders[0].found
    taken = next((what for what in found if isinstance(what, CheckpointInfo)), None)
    if taken is None:
        problem = found[0].problem if found and isinstance(found[0], Broken) else f"{path} has no checkpoint"
        raise CheckpointNotFoundError(problem)
    return taken.path


def _below(folder: Path, depth: int) -> Iterator[Folder]:
    everything = folder_names(folder)
    found = look(folder)
    store = CheckpointStore(folder)
    remains = store.files.remains(folder)
    if found or remains:
        yield Folder(store, found, remains)
    taken = {what.path.name for what in found} | {path.name for path, _ in remains}
    for name in everything if depth else ():
        if name not in taken and not name.startswith("."):
            yield from _below(folder / name, depth - 1)
