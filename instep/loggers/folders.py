"""Folders of runs: their names and numbers, the choice for a run or logger, and which folders are a run's.

Other programs may use the same `save_dir`, so files in it are not trusted.
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
    """Name of a run folder among others, and whether it belongs to a new run."""

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
    """Choose the folder that a run, or one of its loggers, writes into. A pure function that reads no disk.

    All names are those of folders in the same parent folder, `<save_dir>/<name>` or `instep_runs`.

    Args:
        asked: the name that the user gave by a logger's `version`; None if there is none.
        opened: the folder that was opened before the run, which takes it.
        run: for a logger, the folder of its run: one run has one folder, unless the user asked for another.
        goes_on: the folder to continue in: that of the run that is resumed or evaluated.
        is_free: whether the folder `asked` has nothing of another run.
        next_number: the number of the next folder `version_<n>`.

    Returns:
        The first of these that is given: `opened`, `run`, `goes_on`, `asked` if it is free, the next number.

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
    """Return the name of a run folder in `base`, several folders deep only if `asked` is; None if it is elsewhere."""
    if folder is None:
        return None
    folder, base = folder.absolute(), base.absolute()
    if asked is not None and folder == base / asked:
        return asked
    return folder.name if folder.parent == base else None


def folder_name(version: int | str) -> str:
    """Return the name of a version's folder."""
    return f"version_{version}" if isinstance(version, int) else version


def version_of(folder: str) -> int | str:
    """Return the version that a folder's name stands for: N for `version_N`, else the name."""
    number = number_of(folder)
    return folder if number is None or folder_name(number) != folder else number


def number_of(folder: str) -> int | None:
    """Return N of a folder's name `version_N`; None for other names."""
    found = _NUMBERED.fullmatch(folder)
    return None if found is None else int(found[1])


def next_version(parent: Path) -> int:
    """Return the number after the highest one."""
    numbers = [number_of(path.name) for path in parent.glob("version_*")]
    return max((number for number in numbers if number is not None), default=-1) + 1


def make_next(parent: Path) -> Path:
    """Make the next numbered folder; if several programs ask at once, each gets its own."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = parent / folder_name(next_version(parent))
        with suppress(FileExistsError):  # another program took it in the meantime
            folder.mkdir()
            return folder


def runs_in(base: Path, shared: bool) -> list[Path]:
    """List the run folders in a folder, the newest first: by number, then by name.

    Args:
        base: the folder.
        shared: whether `base` may hold folders of other programs, and runs of any name. Then only runs of instep are
            listed, and no links.
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
    """Return whether a folder is that of a run of instep, and not a link."""
    if not folder.is_dir() or leads_out(folder):
        return False
    checkpoints = folder / "checkpoints"
    return (folder / NAME).is_file() or any(checkpoints.glob(".lease-*")) or any(checkpoints.glob("*/manifest.json"))


def leads_out(folder: Path) -> bool:
    """Return whether a folder or its `checkpoints` is a link, which may lead to anybody's files."""
    return any(os.path.islink(path) for path in (folder, folder / "checkpoints"))


def is_free(folder: Path) -> bool:
    """Return whether a run may use a folder: it may contain other files, but none of another run."""
    if not os.path.lexists(folder):
        return True
    if leads_out(folder) or not folder.is_dir():
        return False
    taken = any(os.path.lexists(folder / name) for name in (NAME, "checkpoints"))
    return not taken and not any(found for pattern in _LOGS for found in folder.glob(pattern))
