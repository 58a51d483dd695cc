"""The file operations of a checkpoint store: they compute checksums while they write.

`patiently` repeats a read after an error that may be temporary.

`Files.trace` is called before each operation, so that tests can record the operation, raise an error in its place, or
kill the process.
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

PAUSES_S = (0.5, 2.0)  # seconds to wait before the second and the third try
sleep = time.sleep  # a name of this module, so that tests can replace the function

_PASSING_NAMES = (
    *("EAGAIN", "EBUSY", "EINTR", "EIO", "EREMOTEIO", "ESTALE", "ETIMEDOUT", "EPIPE"),
    *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
)
_PASSING = {getattr(errno, name) for name in _PASSING_NAMES if hasattr(errno, name)}


def passing(error: BaseException | None) -> bool:
    """Return True if an error, or its cause, may be temporary: a short fault of a network or server."""
    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)):
            return True
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        error = error.__cause__
    return False


def wait(pause_s: float, what: str) -> None:
    """Warn that an operation has failed and is tried again, and wait before the next try."""
    warn_user(what)
    sleep(pause_s)


def patiently(read: Callable[[], T], again: Callable[[BaseException], bool] = passing) -> T:
    """Call `read` and return its result; after an error for which `again` returns True, try at most twice more."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except Exception as error:
            if not again(error):
                raise
            wait(pause_s, f"reading failed for now, and is tried again: {error}")
    return read()


class Files(ABC):
    """Base class for the file operations of a checkpoint store on one kind of file system.

    A subclass implements the abstract methods. The other methods suit an object store, where a write is durable as soon
    as it has returned, and a folder exists if it has files.

    Args:
        trace: function for tests, called before each operation with the operation's name, its path, and the bytes to
            write or the target of a rename. If it raises an error, the operation raises that error.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace

    def _before(self, operation: str, path: Path, detail: Any = None) -> None:
        if self.trace is not None:
            self.trace(operation, path, detail)

    # ---- files

    @abstractmethod
    def create(self, path: Path, total_bytes: int | None = None) -> OutFile:
        """Open a new file for writing."""

    def write_file(self, path: Path, data: Data) -> FileRecord:
        """Write a new file with this content, and wait until it is on the disk."""
        with self.create(path, len(data)) as out:
            out.write(data)
            return out.close()

    @abstractmethod
    def size(self, path: Path) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def hash(self, path: Path) -> FileRecord:
        """Read a file, and return its size and checksums."""

    def sync_and_hash(self, path: Path) -> FileRecord:
        """Wait until a file that other code wrote is on the disk; return its size and checksums."""
        return self.hash(path)

    @abstractmethod
    def read_range(self, path: Path, begin: int, end: int) -> bytearray:
        """Read the bytes of a file from `begin` up to `end` (exclusive); fewer if the file is shorter."""

    def read(self, path: Path, most: int) -> bytes:
        """Read a file of at most `most` bytes; raise OSError if it is larger."""
        data = self.read_range(path, 0, most + 1)  # without asking for the size first, which would be another request
        if len(data) > most:
            raise too_large(path, self.size(path), most)
        return bytes(data)

    @abstractmethod
    def fetched(self, path: Path, check: bool) -> AbstractContextManager[tuple[Path, FileRecord | None]]:
        """Yield the path of a local file with the content of `path`, and the size and checksums of this content.

        The local file is `path` itself, or a temporary download. If `check` is False, None may be yielded instead of
        size and checksums.
        """

    # ---- folders

    @abstractmethod
    def entries(self, folder: Path) -> dict[str, bool]:
        """Return the names in a folder, including hidden ones, each with True if it is a folder.

        The dict is empty if the folder does not exist.
        """

    def folders(self, root: Path) -> list[str]:
        """Return the names of the folders in `root`, sorted."""
        return sorted(name for name, is_folder in self.entries(root).items() if is_folder)

    @abstractmethod
    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the size in bytes of every file in a folder and below it, by relative path with slashes."""

    def looks_damaged(self, folder: Path) -> bool:
        """Return True if a folder without a manifest is a damaged checkpoint, and not a save in progress."""
        return False

    # ---- operations of a save, in the order in which they are called

    def make_root(self, root: Path) -> None:  # noqa: B027  an object store does not need it
        """Make the folder of checkpoints and its parents, if they do not exist."""

    @abstractmethod
    def begin(self, final: Path) -> Path:
        """Make the folder that a save writes to; raise FileExistsError if another save uses the same name."""

    def write_manifest(self, folder: Path, manifest: bytes) -> None:  # noqa: B027  not needed if `publish` writes it
        """Write the manifest, and wait until the folder is on the disk; the last operation before `publish`."""

    @abstractmethod
    def publish(self, folder: Path, final: Path, manifest: bytes) -> None:
        """Commit the save by one atomic operation, which makes the folder `final` a checkpoint."""

    # ---- deletion

    @abstractmethod
    def delete(self, folder: Path) -> None:
        """Remove a folder; a checkpoint disappears atomically. Do nothing if the folder does not exist."""

    @abstractmethod
    def leftovers(self, root: Path) -> list[tuple[Path, bool | None]]:
        """Return folders that are not checkpoints: running saves, saves of dead processes, partly removed folders.

        Returns:
            Pairs of a folder and whether its process has ended: True, False, or None if this host cannot know it.
        """

    # ---- lease files, which are beside the checkpoints

    @abstractmethod
    def create_exclusive(self, path: Path, data: bytes) -> bool:
        """Create a file with its content atomically, and wait until it is on the disk; return False if it exists."""

    @abstractmethod
    def replace(self, path: Path, data: bytes) -> None:
        """Replace the content of a file atomically."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Remove a file; do nothing if it does not exist."""


class LocalOut(OutFile):
    """A new file on a local disk; `close` waits (fsync) until the content is on the disk."""

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
    """File operations of a checkpoint store on a local file system, where a rename is atomic.

    A save is written to a hidden folder beside the checkpoints, which is renamed at the end. The names of the
    operations for `trace` are mkdir, create, write, fsync, fsync_folder, rename, unlink and rmdir.

    Args:
        trace: function for tests, called before each operation with the operation's name, its path, and the bytes to
            write or the target of a rename. If it raises an error, the operation raises that error.

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
        return read_regular(path, most)  # this raises an error, without reading, for a file of more than `most` bytes

    def read_range(self, path: Path, begin: int, end: int) -> bytearray:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # Allocate at most the size of the file, since a damaged header may ask for any number of bytes.
            data = bytearray(max(0, min(end, size) - begin))
            file.seek(begin)
            done = 0
            while count := file.readinto(memoryview(data)[done:]):  # repeated, since one call reads at most 2 GiB
                done += count
        del data[done:]
        return data

    @contextmanager
    def fetched(self, path: Path, check: bool) -> Iterator[tuple[Path, FileRecord | None]]:
        open_regular(path).close()  # this raises an error if `path` is not a regular file
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
        """Make the folder of checkpoints and its parents, if they do not exist, and wait until they are on the disk."""
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        for folder in reversed(missing):
            self.make_folder(folder, exist_ok=True)

    def make_folder(self, folder: Path, exist_ok: bool = False) -> None:
        """Make a folder, and wait until it is on the disk."""
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
        """Wait (fsync) until the entries of a folder are on the disk."""
        self._before("fsync_folder", path)
        atomic.sync_path(path)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder atomically; both names must be on the same file system."""
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
        """Delete a folder and everything below it; entries that do not exist any more are ignored."""
        for here, folders, found in os.walk(folder, topdown=False):
            for name in found:
                self._before("unlink", Path(here, name))
                Path(here, name).unlink(missing_ok=True)
            for name in folders:  # os.walk lists a symbolic link to a folder as a folder
                if Path(here, name).is_symlink():
                    Path(here, name).unlink(missing_ok=True)
            self._before("rmdir", Path(here))
            os.rmdir(here)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()  # this usually needs no system call, unlike Path.is_dir
    except OSError:
        return False  # the entry is, for instance, a symbolic link that leads to itself
