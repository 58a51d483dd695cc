"""A disk that loses power: what may be on it after a store's operations, those not fsynced kept or lost in any subset.

The rules are POSIX's bare ones, harder than any journaling file system's:

- what was written to a file since its fsync may be there, lost, or there in part, also with zeros for content;
- an entry of a folder (a new one, a removed one, a rename within the folder) that was made since the folder's fsync may
  be there or lost, each on its own; entries of one name in their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Operation: TypeAlias = "tuple[str, Path, Any]"


@dataclass
class _File:
    content: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(default_factory=list)  # changes; None: gone

    def apply(self, change: dict[str, _File | _Folder | None]) -> None:
        self.pending.append(change)
        _change(self.entries, change)


class Disk:
    """The state of a folder under a log of operations.

    Args:
        root: an existing folder, empty at first, below which all operations are.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _Folder()

    def do(self, operation: Operation) -> None:
        """Take in one operation of a `FaultPlan`'s log."""
        name, path, detail = operation
        if name == "mark":
            return
        if name == "fsync_folder":
            if path == self._root or self._root in path.parents:
                folder = self._folder(path)
                folder.synced, folder.pending = dict(folder.entries), []
            return
        parent = self._folder(path.parent)
        if name in ("mkdir", "create"):
            parent.apply({path.name: _Folder() if name == "mkdir" else _File()})
        elif name in ("unlink", "rmdir"):
            parent.apply({path.name: None})
        elif name == "rename":
            assert detail.parent == path.parent, "a rename into another folder is two entries that may part"
            parent.apply({path.name: None, detail.name: parent.entries[path.name]})
        elif name in ("create_exclusive", "replace"):  # a temporary file under this name; only the first is fsynced
            content = bytes(detail)
            parent.apply({path.name: _File(content, content if name == "create_exclusive" else b"")})
        elif name in ("write", "fsync"):
            file = parent.entries[path.name]
            assert isinstance(file, _File)
            if name == "write":
                file.content += detail
            else:
                file.synced = file.content
        else:
            raise AssertionError(f"this disk does not know {name!r}")

    def after_power_loss(self, target: Path, keep: Callable[[], float]) -> None:
        """Make what is left as real files.

        Args:
            target: a folder that is made.
            keep: asked for each thing that is not synced: 0.0 loses it, 1.0 keeps it; of what a file got, a part.
        """
        _leave(self._top, target, keep)

    def _folder(self, path: Path) -> _Folder:
        folder: Any = self._top
        for part in path.relative_to(self._root).parts:
            folder = folder.entries[part]
        assert isinstance(folder, _Folder)
        return folder


def losses(seed: int, subsets: int) -> Sequence[Callable[[], float]]:
    """Ways to lose power: all that is not synced is lost, none of it, and random subsets."""

    def at_random(rng: random.Random) -> Callable[[], float]:
        return lambda: rng.choice((0.0, 1.0, rng.random()))

    return [lambda: 0.0, lambda: 1.0, *(at_random(random.Random(f"{seed} {number}")) for number in range(subsets))]


def _change(entries: dict[str, _File | _Folder], change: dict[str, _File | _Folder | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode


def _leave(folder: _Folder, target: Path, keep: Callable[[], float]) -> None:
    target.mkdir()
    entries = dict(folder.synced)
    for change in folder.pending:
        if keep() >= 0.5:
            _change(entries, change)
    for name, inode in entries.items():
        if isinstance(inode, _Folder):
            _leave(inode, target / name, keep)
        else:
            (target / name).write_bytes(_content(inode, keep))


def _content(file: _File, keep: Callable[[], float]) -> bytes:
    if file.content == file.synced:
        return file.synced
    share = keep()
    new = file.content[len(file.synced) :]
    part = new[: round(len(new) * share)]
    if 0.0 < share < 0.25:
        part = bytes(len(new))  # the length came first, the content not at all
    return file.synced + part
