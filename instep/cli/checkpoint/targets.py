"""Find the checkpoints that a PATH on the command line means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from instep.checkpoint import CheckpointInfo, CheckpointStore, find_checkpoint, names
from instep.checkpoint.manifest import MANIFEST
from instep.checkpoint.scan import Broken, folder_names, list_checkpoints
from instep.cli import output
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from instep.utils.paths import to_path

_DEPTH = 6  # levels of folders: runs/<experiment>/instep_runs/version_0/checkpoints has five; one is added for safety


@dataclass(frozen=True)
class Folder:
    """A folder of checkpoints, and the checkpoints in it that a path means.

    Args:
        store: the folder, as a `CheckpointStore` that reads it.
        found: checkpoints in the folder, the newest first.
        leftovers: folders of saves in progress, of interrupted saves and of deletions; each with True if no process
            works in it, False if one does, None if that cannot be known from here.
    """

    store: CheckpointStore
    found: list[CheckpointInfo | Broken]
    leftovers: list[tuple[Path, bool | None]]


def find(path: str) -> list[Folder]:
    """Find the folders of checkpoints that a path means: the path, folders below it, or the parent of one checkpoint.

    Args:
        path: a checkpoint, a folder of checkpoints, a run folder, or a folder of runs, on a disk or as a URL.

    Raises:
        CheckpointNotFoundError: no checkpoint is found.
    """
    here = to_path(path).absolute()
    if not here.exists():
        try:
            # `find_checkpoint` finds "runs/best-2" for "runs/best"; its error lists the checkpoints that exist.
            here = find_checkpoint(here)
        except CorruptCheckpointError as error:
            here = to_path(error.path or here)
    if here.is_file():
        raise CheckpointNotFoundError(f"{here} is a file; a checkpoint is a folder", path=here)
    if (here / MANIFEST).exists() or names.step_of(here.name) is not None:
        store = CheckpointStore(here.parent)
        return [Folder(store, [what for what in list_checkpoints(store.root) if what.path.name == here.name], [])]
    folders = list(_below(here, _DEPTH))
    if not folders:
        raise CheckpointNotFoundError(f"there is no checkpoint in {here}, nor up to {_DEPTH} folders below it")
    return folders


def candidates(path: str) -> list[CheckpointInfo | Broken]:
    """Return the checkpoints that a path means, all of them in one folder, the newest first.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointError: the path means several folders of checkpoints.
    """
    folders = find(path)
    if len(folders) > 1:
        listed = ", ".join(str(folder.store.root) for folder in folders[:5])
        raise CheckpointError(f"{path} has several folders of checkpoints ({listed}, ...); give one of them")
    if not folders[0].found:
        raise CheckpointNotFoundError(f"{path} has no checkpoint")
    return folders[0].found


def find_one(path: str) -> Path:
    """Return the newest readable checkpoint that a path means; warn about each newer one that is damaged.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: all checkpoints are damaged.
        CheckpointError: the path means several folders of checkpoints.
    """
    damaged: list[Broken] = []
    for what in candidates(path):
        if isinstance(what, CheckpointInfo):
            for broken in damaged:
                pass_over(broken.damage)
            return what.path
        damaged.append(what)
    raise CorruptCheckpointError(damaged[0].damage, path=damaged[0].path)


def pass_over(problem: str) -> None:
    """Warn that a checkpoint is damaged, and that the next older one is tried; `problem` describes the damage."""
    output.warn(f"{problem} The next older one is taken.")


def _below(folder: Path, depth: int) -> Iterator[Folder]:
    everything = folder_names(folder)
    found = list_checkpoints(folder)
    store = CheckpointStore(folder)
    leftovers = store.files.leftovers(folder)
    if found or leftovers:
        yield Folder(store, found, leftovers)
    taken = {what.path.name for what in found} | {path.name for path, _ in leftovers}
    for name in everything if depth else ():
        if name not in taken and not name.startswith("."):
            yield from _below(folder / name, depth - 1)
