"""Names of folders in a store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from instep.errors import CheckpointError, SettingError

MANIFEST = "manifest.json"
SAVING = ".saving-"  # prefix of a folder that is being written by the process at the end of its name
DELETING = ".deleting-"  # prefix of an abandoned folder that is not removed yet
_NUMBERED = re.compile(r"(?P<base>.+)-(?P<attempt>\d+)", re.DOTALL)
_STEP = re.compile(r"step-(?P<step>\d+)")
_MAX_BYTES = 150  # file systems allow 255 bytes; the prefix and the owner need the rest


def base_name(step: int, name: str | None) -> str:
    """Make the name of a checkpoint without its attempt.

    Raises:
        SettingError: the name cannot be that of one visible folder, or the step is not a count.
    """
    if type(step) is not int or step < 0:
        raise SettingError(f"step={step!r} is no count of steps. Give an int from 0 on.", field="step", got=step)
    if name is None:
        return f"step-{step:08d}"
    if (
        not name
        or name.startswith(".")
        or "/" in name
        or "\\" in name
        or "\0" in name
        or len(name.encode()) > _MAX_BYTES
    ):
        raise SettingError(
            f"name={name!r} cannot name a checkpoint. Give a folder name without separators that does not start with a "
            f"dot and has at most {_MAX_BYTES} bytes.",
            field="name",
            got=name,
        )
    return name


def split_name(folder: str) -> tuple[str, int] | None:
    """Split a folder's name into base and attempt; None if it is no name of a checkpoint."""
    match = _NUMBERED.fullmatch(folder)
    return None if match is None else (match["base"], int(match["attempt"]))


def step_of(folder: str) -> tuple[int, int] | None:
    """Read step and attempt from the name of a folder; None if the name does not have them."""
    parts = split_name(folder)
    match = None if parts is None else _STEP.fullmatch(parts[0])
    return None if match is None or parts is None else (int(match["step"]), parts[1])


def saving_name(final: str, owner: str) -> str:
    """Make the name of the hidden folder that a save is written to."""
    return f"{SAVING}{final}@{owner}"


def saving_owner(folder: str) -> str:
    """Return the process that writes to a hidden folder."""
    return folder.rpartition("@")[2]


def is_plain_name(name: str) -> bool:
    """Return True if a name is that of a visible file in the folder itself, and not the manifest's."""
    return "/" not in name and is_inner_name(name)


def is_inner_name(name: str) -> bool:
    """Return whether a name is that of a visible file in the folder or below it, and not the manifest's."""
    parts = name.split("/")
    return name != MANIFEST and all(
        part == Path(part).name and not part.startswith(".") and "\0" not in part and part != "" for part in parts
    )


def inside(folder: Path, name: Any, said_by: Path) -> Path:
    """Return the path in a folder for a name that a file contains.

    Args:
        folder: folder that must contain the path.
        name: name in the file.
        said_by: path of the file, for the text of errors.

    Raises:
        CheckpointError: the name leads out of the folder, by its text or by a link.
    """
    if not isinstance(name, str) or not is_inner_name(name) or _leads_out(folder, folder / name):
        raise CheckpointError(f"{said_by} names {str(name)[:200]!r}, which leads out of its folder", path=said_by)
    return folder / name


def _leads_out(folder: Path, path: Path) -> bool:
    if not isinstance(path, Path):  # an object store has no links
        return False
    holder = path if path.is_dir() else path.parent
    if holder == folder:
        return False
    return not Path(os.path.realpath(holder)).is_relative_to(os.path.realpath(folder))
