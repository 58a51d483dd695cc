"""Check the files of `<run>/loggers`, which another user or program may have written.

The note, a JSON file beside a backlog of records, says where the records are sent. Notes and records that this user has
written carry this user's mark, a digest with a secret key (`instep.utils.private_files`). A note without the mark is
not trusted. A record without the mark is sent only if no path in it leads out of the run folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any
from uuid import uuid4

from instep.errors import SettingError
from instep.loggers.backlog import Record, read_note
from instep.utils.private_files import Seal, is_own, mark

_STATUS = ("success", "interrupted", "failed")
_WITH_FILES = ("_log_artifact", "_log_checkpoint", "_after_save_checkpoint")
_HOOKS = (
    *("_log_metrics", "_log_hyperparams", "_log_text", "_log_image", "_log_audio", "_log_video", "_log_histogram"),
    *("_log_table", "_log_code", *_WITH_FILES),
)
_VALUES = (str, int, float, bool, type(None))


def signed(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the content of a logger's note file, with a digest that proves that this user wrote it."""
    return {**note, "mark": mark(dict(note))}


def is_signed(note: Mapping[str, Any]) -> bool:
    """Return True if the content of a logger's note file has a digest that proves that this user wrote it."""
    return is_own({key: value for key, value in note.items() if key != "mark"}, note.get("mark"))


def seal_of(path: Path) -> Seal:
    """Return an object that marks records as written by this user.

    It has the id in the note file, so that it recognizes earlier marks. If the note is not trusted, it has a new id.

    Args:
        path: path of the note file, a JSON file that describes the logger.
    """
    note = read_note(path)
    return Seal(str(note["id"]) if "id" in note and is_signed(note) else uuid4().hex)


def version_in(note: Mapping[str, Any]) -> int | str | None:
    """Return the run's version from the content of a logger's note file.

    Raises:
        SettingError: the version is not None, a number or the name of a folder.
    """
    version = note.get("version")
    if not is_version(version):
        raise SettingError(f"the note of a logger has the version {version!r:.80}, which is no name of a folder")
    return version


def is_version(version: Any) -> bool:
    """Return True if a version is None, a number, or a folder name without separators or ".."."""
    name = str(version)
    return isinstance(version, int | str | None) and name != ".." and PurePath(name).name == name and "\0" not in name


def sent_in(note: Mapping[str, Any]) -> dict[str, int]:
    """Return the last sent step of each metric from a logger's note file; invalid entries are left out."""
    sent = note.get("sent")
    return {name: step for name, step in sent.items() if type(step) is int} if isinstance(sent, dict) else {}


def status_in(note: Mapping[str, Any]) -> str:
    """Return how the run ended, from a logger's note file; "interrupted" if the file has no valid status."""
    status = note.get("status")
    return status if status in _STATUS else "interrupted"


def arguments_in(note: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments of a logger from the content of its note file.

    Raises:
        SettingError: an argument is not a string, number, bool or None.
    """
    given = note.get("arguments")
    arguments = given if isinstance(given, dict) else {}
    wrong = next((name for name, value in arguments.items() if not isinstance(value, _VALUES)), None)
    if wrong is not None:
        raise SettingError(f"{path}: the argument {wrong!r:.80} is no plain value")
    return arguments


def files_of(record: Record) -> Iterator[Path]:
    """Yield the paths of the files that a logger would read and send for a record."""
    parts: list[Any] = list(record.args)
    while parts:
        part = parts.pop()
        if isinstance(part, PurePath):
            yield Path(part)
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
        elif hasattr(part, "path") and hasattr(part, "type"):
            yield Path(str(part.path))


def why_not(record: Record, run: Path) -> str:
    """Return the reason not to send a record that another user may have written; "" if it may be sent.

    Args:
        record: record from a backlog file in the run folder.
        run: the run folder.
    """
    if record.hook not in _HOOKS:
        return f"{record.hook!r} is no hook of a logger"
    first = record.args[0] if record.args else None
    names = [*record.names(), *(str(getattr(first, key)) for key in ("name", "type") if hasattr(first, key))]
    names += [name for part in record.args if isinstance(part, dict) for name in part]
    wrong = next((name for name in names if leads_out(str(name))), None)
    if wrong is not None:
        return f"the name {wrong!r:.80} leads out of a folder"
    if record.hook in _WITH_FILES:
        of_kind = isinstance(getattr(first, "path", first), PurePath)
        return next(filter(None, (why_outside(path, run) for path in files_of(record))), "" if of_kind else "no path")
    return "a path where none belongs" if any(files_of(record)) else ""


def why_outside(path: Path, folder: Path, exists: bool = True) -> str:
    """Return the reason why a file, or a folder with all its content, may lead out of a parent folder; "" if none.

    Symbolic links, hard links and special files count as leading out.

    Args:
        path: path of the file or folder to check.
        folder: the parent folder.
        exists: whether a missing path is a reason too.
    """
    root = folder.resolve()
    try:
        inside = root in path.resolve().parents
    except (OSError, RuntimeError, ValueError) as error:
        return f"{path}: {error}"
    if not inside:
        return f"{path} is outside of {folder}"
    if not exists and not os.path.lexists(path):
        return ""
    for place in (path, *_below(path)):
        try:
            state = os.lstat(place)
        except OSError as error:
            return f"{place}: {error.strerror}"
        if not (stat.S_ISDIR(state.st_mode) or (stat.S_ISREG(state.st_mode) and state.st_nlink == 1)):
            return f"{place} is a link, or no regular file"
    return ""


def why_links(folder: Path) -> str:
    """Return which symbolic link in a folder leads out of it, or which entry is a special file; "" if none."""
    root = folder.resolve()
    for place in _below(folder):
        try:
            mode = os.lstat(place).st_mode
        except OSError:
            continue
        if stat.S_ISLNK(mode) and not place.resolve().is_relative_to(root):
            return f"{place} is a link to {os.readlink(place)}"
        if not (stat.S_ISLNK(mode) or stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            return f"{place} is no regular file"
    return ""


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        yield from (Path(root, name) for name in (*folders, *files))


def leads_out(name: str) -> bool:
    """Return True if a name, used as a relative path, would lead out of its folder."""
    parts = name.replace("\\", "/").split("/")
    return ".." in parts or name.startswith(("/", "~", "\\")) or "\0" in name
