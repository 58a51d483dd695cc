"""Make, parse and check the names of checkpoint folders and of the files in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from instep.errors import CheckpointError, SettingError

MANIFEST = "manifest.json"
SAVING = ".saving-"  # prefix of a folder that is being written; the folder's name ends with the writing process's id
DELETING = ".deleting-"  # prefix of a deleted checkpoint whose files are not all removed yet
_NUMBERED = re.compile(r"(?P<base>.+)-(?P<attempt>\d+)", re.DOTALL)
_STEP = re.compile(r"step-(?P<step>\d+)")
_MAX_BYTES = 150  # limit for a name; file systems allow 255 bytes, but a prefix and the process's id are added


def base_name(step: int, name: str | None) -> str:
    """Return the name of a checkpoint folder without "-<attempt>": `name`, or "step-<8 digits>" for None.

    Raises:
        SettingError: `name` is not a valid name of a visible folder, or the step is not an integer of at least 0.
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
    """Split a folder name "<base>-<attempt>" into base and attempt; None if it is not the name of a checkpoint."""
    match = _NUMBERED.fullmatch(folder)
    return None if match is None else (match["base"], int(match["attempt"]))


def step_of(folder: str) -> tuple[int, int] | None:
    """Return step and attempt from a folder name "step-<step>-<attempt>"; None for another name."""
    parts = split_name(folder)
    match = None if parts is None else _STEP.fullmatch(parts[0])
    return None if match is None or parts is None else (int(match["step"]), parts[1])


def saving_name(final: str, owner: str) -> str:
    """Return the name of the hidden folder that a save writes to before its commit."""
    return f"{SAVING}{final}@{owner}"


def saving_owner(folder: str) -> str:
    """Return the id of the process that writes to the hidden folder of a save, from the folder's name."""
    return folder.rpartition("@")[2]


def is_plain_name(name: str) -> bool:
    """Return True if a name is valid for a file in a checkpoint: visible, without folders, and not the manifest."""
    return "/" not in name and is_inner_name(name)


def is_inner_name(name: str) -> bool:
    """Return True if a relative path is valid for a file in a checkpoint: visible parts, and not the manifest."""
    parts = name.split("/")
    return name != MANIFEST and all(
        part == Path(part).name and not part.startswith(".") and "\0" not in part and part != "" for part in parts
    )


def inside(folder: Path, name: Any, said_by: Path) -> Path:
    """Return the path of a file that another file names, and check that it is inside of a folder.

    Args:
        folder: folder that must contain the path.
        name: name that was read from a file.
        said_by: path of the file that contains the name, for error messages.

    Raises:
        CheckpointError: `is_inner_name` refuses the name, such as "../a", or a symbolic link leads out of the folder.
    """
    if not isinstance(name, str) or not is_inner_name(name) or _leads_out(folder, folder / name):
        raise CheckpointError(f"{said_by} names {str(name)[:200]!r}, which leads out of its folder", path=said_by)
    return folder / name


def _leads_out(folder: Path, path: Path) -> bool:
    if not isinstance(path, Path):  # no check, since an object store has no symbolic links
        return False
    holder = path if path.is_dir() else path.parent
    if holder == folder:
        return False
    return not Path(os.path.realpath(holder)).is_relative_to(os.path.realpath(folder))
