"""Remove runs: move them into a trash on the same file system, from which only `empty` deletes them.

A run is moved by one rename of its folder. If the run has checkpoints, this program holds their lease meanwhile, so
that no run can begin to save there. A link in the folder is moved as a link: nothing outside of the run's folder is
opened, moved or deleted.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from instep.errors import UsageError
from instep.health.run_status import NAME as STATUS
from instep.health.run_status import read_status
from instep.runs.folder import DEPTH
from instep.runs.status import look, own
from instep.utils.untrusted_files import clean

# Matches a name in the trash: the time of the removal, and the name of the folder.
_REMOVED = re.compile(r"\d{8}-\d{6}-.+", re.DOTALL)


def describe(folder: Path) -> str:
    """Describe a run folder in one line: files, bytes, checkpoints, links; no link is followed."""
    files, size, links = 0, 0, list[str]()
    for root, folders, names in os.walk(folder):
        for path in (Path(root, name) for name in (*names, *folders)):
            if path.is_symlink():
                links.append(str(path.relative_to(folder)))
            elif path.name in names:
                files, size = files + 1, size + path.lstat().st_size
    saved = folder / "checkpoints"
    is_there = own(saved, folder) and saved.is_dir()
    checkpoints = sum(path.is_dir() and path.name[:1] != "." for path in saved.iterdir()) if is_there else 0
    text = f"{folder}: {files:,} files, {size / 1e6:,.3g} MB, checkpoints: {checkpoints:,}"
    return clean(f"{text}, links, whose targets stay: {', '.join(links[:3])}" if links else text, "")


def check_removable(folder: Path) -> None:
    """Raise if a folder is not a run that this user may remove.

    Raises:
        UsageError: the folder is a link, is not a run of instep, belongs to another user, or its run still goes on.
    """
    shown = clean(str(folder))
    if folder.is_symlink():
        raise UsageError(f"{shown} is a link; name the folder that it leads to")
    if not (own(folder / STATUS, folder) and (folder / STATUS).is_file()):
        raise UsageError(f"{shown} is no run of instep: it has no {STATUS}. Remove it yourself")
    if (owner := os.lstat(folder).st_uid) != os.geteuid():
        raise UsageError(f"{shown} belongs to another user (id {owner}): only they remove it")
    status = look(folder)
    if status.state in ("running", "starting"):
        where = ", ".join(f"{key} {status.said[key]}" for key in ("host", "pid") if key in status.said)
        raise UsageError(f"{shown} is {status.state} ({where}): stop it first")


def remove(folder: Path) -> Path:
    """Move a run into the trash beside it.

    Args:
        folder: the run folder.

    Returns:
        Path of the run in the trash.

    Raises:
        UsageError: the run may not be removed (see `check_removable`), or the trash is not a real folder of this user.
        FolderInUseError: a running program uses the checkpoints of the run.
        OSError: the folder cannot be moved.
    """
    folder = folder.absolute()
    with ExitStack() as stack:
        saved = folder / "checkpoints"
        if own(saved, folder) and saved.is_dir():
            from instep.checkpoint.lease import Lease  # imported late, since it loads torch

            # The lease is taken under the run's own id, so that the run is still the folder's last holder if a user
            # moves it back from the trash.
            run_id = (read_status(folder) or {}).get("run_id")
            lease = Lease.take(saved, str(run_id))
            stack.callback(lease.release)
        check_removable(folder)  # checked again, since the run may have started in the meantime
        trash = folder.parent / _trash_name()
        trash.mkdir(mode=0o700, exist_ok=True)
        if not _is_trash(trash):
            raise UsageError(f"{clean(str(trash))} is no folder of yours, so nothing is moved into it: remove it first")
        target = trash / f"{time.strftime('%Y%m%d-%H%M%S')}-{folder.name}"
        while os.path.lexists(target):
            target = target.with_name(f"{target.name}+")
        os.rename(folder, target)
    return target


def find_trash(folder: Path) -> list[Path]:
    """List the removed runs in the trashes of this user at a folder and up to six levels of folders below it.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{clean(str(folder))} is no folder: give one that removed runs are below")
    return sorted(path for trash in _trashes(folder.absolute(), DEPTH) for path in _removed(trash))


def empty(removed: Path) -> None:
    """Delete a removed run for good; if its trash is empty then, delete the trash too.

    A link inside the run is deleted, but not the file or folder that it leads to.

    Args:
        removed: a path that `find_trash` returned.

    Raises:
        UsageError: the path is not a removed run in a trash of this user.
    """
    if not (_is_trash(removed.parent) and removed in _removed(removed.parent)):
        raise UsageError(f"{clean(str(removed))} is no removed run")
    shutil.rmtree(removed)
    if not any(removed.parent.iterdir()):
        removed.parent.rmdir()


def _trash_name() -> str:
    return f".instep_trash-{os.geteuid()}"  # each user has a trash, since nobody can write to another user's trash


def _is_trash(path: Path) -> bool:
    try:
        state = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and path.name == _trash_name()


def _removed(trash: Path) -> list[Path]:
    entries = [Path(entry.path) for entry in os.scandir(trash) if entry.is_dir(follow_symlinks=False)]
    return [path for path in entries if _REMOVED.fullmatch(path.name)]


def _trashes(folder: Path, depth: int) -> Iterator[Path]:
    if _is_trash(folder / _trash_name()):
        yield folder / _trash_name()
    try:
        inner = [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in inner if depth else ():
        if not os.path.basename(path).startswith("."):
            yield from _trashes(Path(path), depth - 1)
