"""Choose, number, list and recognize the folders of runs.

Other programs may write into the same `save_dir`, so files in it are not trusted.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from instep.health.run_status import NAME
from instep.utils.warn import warn_user

RUNS = "instep_runs"
"""The folder of run folders, in a Trainer's `default_root_dir`."""

_NUMBERED = re.compile(r"version_([0-9]{1,18})")
_LOGS = ("events.out.tfevents.*", "metrics.csv", "hparams.*")


class Place(NamedTuple):
    """Name of a run folder within its parent folder, and whether the folder is for a new run."""

    name: str
    is_new: bool


def choose_place(
    asked: str | None = None,
    *,
    opened: str | None = None,
    run: str | None = None,
    goes_on: str | None = None,
    is_free: bool = True,
    next_number: int = 0,
) -> Place:
    """Choose the folder that a run, or one of its loggers, writes into. A pure function that does not read the disk.

    All arguments are names of folders in the same parent folder, which is `<save_dir>/<name>` or `instep_runs`.

    Args:
        asked: folder that the user asked for by a logger's `version`; None if the user did not.
        opened: folder that a logger opened before the run; the run uses it.
        run: for a logger: the run folder, into which the logger writes unless `asked` names another folder.
        goes_on: folder of the run that is resumed or evaluated.
        is_free: whether the folder `asked` has no files of another run.
        next_number: number of the next folder `version_<n>`.

    Returns:
        The first folder that is not None: `opened`, `run` (unless `asked` is another folder), `goes_on`, or `asked` (if
        it is free). If there is none of these, a new folder `version_<next_number>`.

    Example:
        >>> choose_place("best", is_free=False, next_number=3)
        Place(name='version_3', is_new=True)
    """
    if opened is not None:
        return Place(opened, True)
    if run is not None and asked in (None, run):
        return Place(run, False)
    if goes_on is not None:
        return Place(goes_on, False)
    if asked is not None and is_free:
        return Place(asked, True)
    return Place(folder_name(next_number), True)


def name_in(base: Path, folder: Path | None, asked: str | None = None) -> str | None:
    """Return a run folder's path relative to `base`, if the folder is `base/asked` or directly in `base`; else None."""
    if folder is None:
        return None
    folder, base = folder.absolute(), base.absolute()
    if asked is not None and folder == base / asked:
        return asked
    return folder.name if folder.parent == base else None


def folder_name(version: int | str) -> str:
    """Return the folder name for a version: `version_N` for a number N, else the version itself."""
    return f"version_{version}" if isinstance(version, int) else version


def version_of(folder: str) -> int | str:
    """Return the version for a folder name: the number N for `version_N`, else the name itself."""
    number = number_of(folder)
    return folder if number is None or folder_name(number) != folder else number


def number_of(folder: str) -> int | None:
    """Return the number N of a folder name `version_N`; None for other names."""
    found = _NUMBERED.fullmatch(folder)
    return None if found is None else int(found[1])


def next_version(parent: Path) -> int:
    """Return the highest number N of the folders `version_N` in a folder, plus one."""
    numbers = [number_of(path.name) for path in parent.glob("version_*")]
    return max((number for number in numbers if number is not None), default=-1) + 1


def make_next(parent: Path) -> Path:
    """Make the next folder `version_N`; several programs that call this at the same time get different folders."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / folder_name(next_version(parent))
        with suppress(FileExistsError):  # another program made the folder first
            folder.mkdir()
            return folder


def runs_in(base: Path, shared: bool) -> list[Path]:
    """Return the run folders in a folder, the newest first: sorted by number, then by name.

    Args:
        base: the folder that contains the run folders.
        shared: False: return all folders `version_N`. True: `base` may contain folders of other programs, so return
            folders of any name if they belong to a run of instep and are not symbolic links.
    """
    if not base.is_dir():
        return []
    found: list[tuple[int, Path]] = []
    for path in base.iterdir():
        number = number_of(path.name)
        if is_run(path) if shared else number is not None:
            found.append((-1 if number is None else number, path.absolute()))
        elif shared and leads_out(path) and (path / NAME).exists() and base.resolve() not in path.resolve().parents:
            warn_user(f"{path} is passed over: it leads out of its folder by a link. Give ckpt_path where it leads to")
    return [path for _, path in sorted(found, reverse=True)]


def is_run(folder: Path) -> bool:
    """Return whether a folder belongs to a run of instep, and is not a symbolic link."""
    if not folder.is_dir() or leads_out(folder):
        return False
    checkpoints = folder / "checkpoints"
    return (folder / NAME).is_file() or any(checkpoints.glob(".lease-*")) or any(checkpoints.glob("*/manifest.json"))


def leads_out(folder: Path) -> bool:
    """Return whether a folder or its subfolder `checkpoints` is a symbolic link, which may lead to any files."""
    return any(os.path.islink(path) for path in (folder, folder / "checkpoints"))


def is_free(folder: Path) -> bool:
    """Return whether a new run may use a folder, because it has no checkpoints or logs of another run."""
    if not os.path.lexists(folder):
        return True
    if leads_out(folder) or not folder.is_dir():
        return False
    taken = any(os.path.lexists(folder / name) for name in (NAME, "checkpoints"))
    return not taken and not any(found for pattern in _LOGS for found in folder.glob(pattern))
