"""Operations of a store on a file system, with hashes of written data, and the faults that are tried again.

`Files.trace` is called before each operation, so that tests can kill, fail or record there.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from instep.checkpoint import names
from instep.checkpoint.hashing import Data, FileRecord, OutFile, Trace, hash_file
from instep.utils import atomic
from instep.utils.process_id import is_gone, this_process
from instep.utils.untrusted_files import open_regular, read_regular, too_large
from instep.utils.warn import warn_user

T = TypeVar("T")

PAUSES_S = (0.5, 2.0)  # pauses before the second and the third try
sleep = time.sleep  # tests replace this

_PASSING_NAMES = (
    *("EAGAIN", "EBUSY", "EINTR", "EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT", "EPIPE"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
)
_PASSING = {getattr(errno, name) for name in _PASSING_NAMES if hasattr(errno, name)}


def passing(error: BaseException | None) -> bool:
    """Return True if an error, or its cause, may pass by itself: a short fault of a network or server."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)):
            return True
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__
    return False


def wait(pause_s: float, what: str) -> None:
    """Warn that an operation is tried again, and wait before that."""
    warn_user(what)
    sleep(pause_s)


def patiently(read: Callable[[], T], again: Callable[[BaseException], bool] = passing) -> T:
    """Call `read` and return its result. Try up to twice more after an error for which `again` returns True."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except Exception as error:
            if not again(error):
                raise
            wait(pause_s, f"reading failed for now, and is tried again: {error}")
    return read()


class Files(ABC):
    """Operations of a store on one kind of file system.

    Each kind implements the abstract methods. The default methods suit an object store: there a write is durable once
    it has returned, and folders exist by their files.

    Args:
        trace: function that is called before each operation with its name, its path, and the bytes of a write or the
            target of a rename. An error that it raises is raised by the operation.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace

    def _before(self, operation: str, path: Path, detail: Any = None) -> None:
        if self.trace is not None:
            self.trace(operation, path, detail)

    # Files.

    @abstractmethod
    def create(self, path: Path, total_bytes: int | None = None) -> OutFile:
        """Open a new file to write to."""

    def write_file(self, path: Path, data: Data) -> FileRecord:
        """Write a new file with this content. It is durable when this returns."""
        with self.create(path, len(data)) as out:
            out.write(data)
            return out.close()

    @abstractmethod
    def size(self, path: Path) -> int:
        """Return the bytes of a file."""

    @abstractmethod
    def hash(self, path: Path) -> FileRecord:
        """Hash the current content of a file."""

    def sync_and_hash(self, path: Path) -> FileRecord:
        """Make a file durable that somebody else wrote, and hash it."""
        return self.hash(path)

    @abstractmethod
    def read_range(self, path: Path, begin: int, end: int) -> bytearray:
        """Read bytes of a file; fewer if the file ends before."""

    def read(self, path: Path, most: int) -> bytes:
        """Read a file of at most `most` bytes; raise OSError if it is larger."""
        data = self.read_range(path, 0, most + 1)  # one request; asking for the size first would make two
        if len(data) > most:
            raise too_large(path, self.size(path), most)
        return bytes(data)

    @abstractmethod
    def fetched(self, path: Path, check: bool) -> AbstractContextManager[tuple[Path, FileRecord | None]]:
        """Yield the path of a local file with the content of `path`, and the `FileRecord` of this content.

        The local file is `path` itself, or a temporary download. The record may be None if `check` is False.
        """

    # Folders.

    @abstractmethod
    def entries(self, folder: Path) -> dict[str, bool]:
        """List the names in a folder, also hidden ones, each with whether it is a folder.

        Empty if there is no folder.
        """

    def folders(self, root: Path) -> list[str]:
        """List the names of the folders in a folder, in order."""
        return sorted(name for name, is_folder in self.entries(root).items() if is_folder)

    @abstractmethod
    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the size of every file in a folder and below it, by relative name with slashes."""

    def looks_damaged(self, folder: Path) -> bool:
        """Return True if a visible folder without a manifest was once a checkpoint, and is not a save in progress."""
        return False

    # Operations of a save, in this order.

    def make_root(self, root: Path) -> None:  # noqa: B027  where folders come with their files
        """Make a folder and its parents, if they are missing."""

    @abstractmethod
    def begin(self, final: Path) -> Path:
        """Make the folder that a save writes to; raise FileExistsError if another save has taken the name."""

    def write_manifest(self, folder: Path, manifest: bytes) -> None:  # noqa: B027  where `publish` writes it
        """Write the manifest and make the folder durable: everything before the instant of the commit."""

    @abstractmethod
    def publish(self, folder: Path, final: Path, manifest: bytes) -> None:
        """Commit at one instant: after this, `final` is a checkpoint; before this, it is none."""

    # Removing.

    @abstractmethod
    def delete(self, folder: Path) -> None:
        """Remove a checkpoint, which vanishes at one instant, or one of `leftovers`. Do nothing if it is gone."""

    @abstractmethod
    def leftovers(self, root: Path) -> list[tuple[Path, bool | None]]:
        """List folders that are no checkpoints: saves in progress, dead saves, partly removed folders.

        Returns:
            Each folder with True if no process works in it, False if one does, None if that cannot be known from here.
        """

    # Small files next to the checkpoints: leases.

    @abstractmethod
    def create_exclusive(self, path: Path, data: bytes) -> bool:
        """Create a file with its content at one instant, durable when this returns; return False if it exists."""

    @abstractmethod
    def replace(self, path: Path, data: bytes) -> None:
        """Replace a file's content at one instant."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a file; do nothing if it is gone."""


class LocalOut(OutFile):
    """New file on a local disk, fsynced at its end."""

    _fd = -1

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _write(self, piece: memoryview) -> int:
        return os.write(self._fd, piece)

    def _finish(self) -> None:
        self._trace("fsync", self.path, None)
        atomic.fsync(self._fd)
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _abandon(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalFiles(Files):
    """Operations of a store on a file system with an atomic rename.

    A save is written to a hidden sibling, which is renamed at the end. The operations are named mkdir, create, write,
    fsync, fsync_folder, rename, unlink and rmdir.

    Args:
        trace: function that is called before each operation with its name, its path, and the bytes of a write or the
            target of a rename. An error that `trace` raises is raised by the operation.

    Example:
        >>> import tempfile
        >>> from instep.checkpoint import CheckpointStore
        >>> seen = []
        >>> files = LocalFiles(trace=lambda operation, path, detail: seen.append(operation))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = CheckpointStore(folder, files).save(10, lambda writer: writer.json("note.json", "hello"))
        >>> "rename" in seen
        True
    """

    def create(self, path: Path, total_bytes: int | None = None) -> OutFile:
        return LocalOut(path, total_bytes, self._before)

    def sync_and_hash(self, path: Path) -> FileRecord:
        self._before("fsync", path)
        with open_regular(path) as file:
            atomic.fsync(file.fileno())
        return hash_file(path)

    def size(self, path: Path) -> int:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size

    def hash(self, path: Path) -> FileRecord:
        return hash_file(path)

    def read(self, path: Path, most: int) -> bytes:
        return read_regular(path, most)  # refuses a larger file before reading any of it

    def read_range(self, path: Path, begin: int, end: int) -> bytearray:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # the limit matters, since a damaged header may ask for any number of bytes
            data = bytearray(max(0, min(end, size) - begin))
            file.seek(begin)
            done = 0
            while count := file.readinto(memoryview(data)[done:]):  # one call reads at most 2 GiB
                done += count
        del data[done:]
        return data

    @contextmanager
    def fetched(self, path: Path, check: bool) -> Iterator[tuple[Path, FileRecord | None]]:
        open_regular(path).close()  # checks that it is a regular file, since the caller may open it by its name
        yield path, hash_file(path) if check else None

    def entries(self, folder: Path) -> dict[str, bool]:
        try:
            with os.scandir(folder) as found:
                return {entry.name: _is_folder(entry) for entry in found}
        except FileNotFoundError:
            return {}

    def sizes(self, folder: Path) -> dict[str, int]:
        return {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in (Path(here, name) for here, _, found in os.walk(folder) for name in found)
        }

    def looks_damaged(self, folder: Path) -> bool:
        if names.step_of(folder.name) is not None:
            return True
        return names.split_name(folder.name) is not None and any(folder.glob("*.safetensors"))

    def make_root(self, root: Path) -> None:
        """Make a folder and its parents, if they are missing, and make each of them durable."""
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        for folder in reversed(missing):
            self.make_folder(folder, exist_ok=True)

    def make_folder(self, folder: Path, exist_ok: bool = False) -> None:
        """Make a folder, which is durable when this returns."""
        self._before("mkdir", folder)
        folder.mkdir(exist_ok=exist_ok)
        self.sync_folder(folder.parent)

    def begin(self, final: Path) -> Path:
        temp = final.with_name(names.saving_name(final.name, this_process()))
        self._before("mkdir", temp)
        temp.mkdir()
        return temp

    def write_manifest(self, folder: Path, manifest: bytes) -> None:
        self.write_file(folder / names.MANIFEST, manifest)
        for here, _, _ in os.walk(folder, topdown=False):
            self.sync_folder(Path(here))

    def publish(self, folder: Path, final: Path, manifest: bytes) -> None:
        self.rename(folder, final)
        self.sync_folder(final.parent)

    def sync_folder(self, path: Path) -> None:
        """Wait until the folder's entries are on the disk."""
        self._before("fsync_folder", path)
        atomic.sync_path(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder on the same file system, at one instant."""
        self._before("rename", old, new)
        os.rename(old, new)

    def create_exclusive(self, path: Path, data: bytes) -> bool:
        self._before("create_exclusive", path, data)
        made = atomic.create_exclusive(path, data)
        self.sync_folder(path.parent)
        return made

    def replace(self, path: Path, data: bytes) -> None:
        self._before("replace", path, data)
        atomic.replace(path, data)

    def remove(self, path: Path) -> None:
        self._before("unlink", path)
        path.unlink(missing_ok=True)

    def delete(self, folder: Path) -> None:
        if not folder.name.startswith("."):
            if not folder.exists():
                return
            to_delete = folder.with_name(f"{names.DELETING}{folder.name}")
            self.remove_tree(to_delete)
            self.rename(folder, to_delete)
            self.sync_folder(folder.parent)
            folder = to_delete
        self.remove_tree(folder)

    def leftovers(self, root: Path) -> list[tuple[Path, bool | None]]:
        found: list[tuple[Path, bool | None]] = []
        for name in self.folders(root):
            if name.startswith(names.DELETING):
                found.append((root / name, True))
            elif name.startswith(names.SAVING):
                found.append((root / name, is_gone(names.saving_owner(name))))
        return found

    def remove_tree(self, folder: Path) -> None:
        """Delete a folder and everything below it. Entries that are gone already are no error."""
        for here, folders, found in os.walk(folder, topdown=False):
            for name in found:
                self._before("unlink", Path(here, name))
                Path(here, name).unlink(missing_ok=True)
            for name in folders:  # os.walk lists links to folders here, but does not enter them
                if Path(here, name).is_symlink():
                    Path(here, name).unlink(missing_ok=True)
            self._before("rmdir", Path(here))
            os.rmdir(here)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()  # usually without a system call, unlike Path.is_dir
    except OSError:
        return False  # the entry is a link that leads to itself
