"""Every change that a store makes to a disk, in one place, hashed on the way.

Tests kill, fail and record at each operation through `LocalFiles.trace`, which is called before it happens.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from instep.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20  # a part of a large file can be verified by itself in these pieces
_BUFFER_BYTES = 2**20  # small writes are joined up to this size
_WRITE_BYTES = 16 * 2**20  # at most so much per system call

Data: TypeAlias = "bytes | bytearray | memoryview"
Trace: TypeAlias = "Callable[[str, Path, Any], None]"


@dataclass(frozen=True)
class FileRecord:
    """What a file must be.

    Args:
        bytes: its size.
        xxh3: xxh3-128 in hex. Over the content up to 64 MiB; of a larger file, over its chunks' digests joined, so that
            one pass over the data gives both.
        chunks: xxh3-128 of each 64 MiB in hex; empty for a file of one chunk.
    """

    bytes: int
    xxh3: str
    chunks: tuple[str, ...] = ()


class Hasher:
    """The record of a file from its content in order, piece by piece."""

    def __init__(self) -> None:
        import xxhash  # late: `instep.trainer` imports this package, most programs never hash

        self._new = xxhash.xxh3_128
        self._chunk = self._new()
        self._filled = 0
        self._done: list[bytes] = []
        self.bytes = 0

    def update(self, data: Data) -> None:
        view = memoryview(data)
        self.bytes += len(view)
        while len(view) > 0:
            if self._filled == CHUNK_BYTES:
                self._done.append(self._chunk.digest())
                self._chunk, self._filled = self._new(), 0
            piece = view[: CHUNK_BYTES - self._filled]
            self._chunk.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]

    def record(self) -> FileRecord:
        digests = [*self._done, self._chunk.digest()]
        if len(digests) == 1:
            return FileRecord(self.bytes, digests[0].hex())
        whole = self._new(b"".join(digests)).hexdigest()
        return FileRecord(self.bytes, whole, tuple(digest.hex() for digest in digests))


def digest(data: Data) -> str:
    """The xxh3-128 of some bytes, in hex."""
    import xxhash  # late, see Hasher

    return xxhash.xxh3_128(data).hexdigest()


def hash_file(path: Path) -> FileRecord:
    """The record of a file as it is on the disk."""
    hasher = Hasher()
    buffer = memoryview(bytearray(4 * 2**20))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            hasher.update(buffer[:size])
    return hasher.record()


class OutFile:
    """A new file that is hashed while it is written, and on the disk once `close` has returned.

    Args:
        path: must not exist.
        total_bytes: what will be written, for the text of errors; None: unknown.
        trace: see `LocalFiles`.
    """

    def __init__(self, path: Path, total_bytes: int | None, trace: Callable[[str, Path, Any], None]) -> None:
        self.path = path
        self._total_bytes = total_bytes
        self._trace = trace
        self._hasher = Hasher()
        self._pending = bytearray()
        self._fd = -1
        try:
            trace("create", path, None)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as error:
            raise CheckpointError(
                f"{path} was written twice in one save. Give each rank's file a name of its own.", path=path
            ) from error
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> OutFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:  # left by an exception: the store removes the folder
            os.close(self._fd)
            self._fd = -1

    def write(self, data: Data) -> None:
        """Append bytes (any contiguous buffer)."""
        view = memoryview(data).cast("B")
        if len(view) >= _BUFFER_BYTES:
            self._flush()
            self._emit(view)
        else:
            self._pending += view
            if len(self._pending) >= _BUFFER_BYTES:
                self._flush()

    def close(self) -> FileRecord:
        """Write what is buffered and wait until the disk has it.

        Returns:
            Size and checksums of what was written.
        """
        self._flush()
        try:
            self._trace("fsync", self.path, None)
            _fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
        except OSError as error:
            raise self._failed(error) from error
        return self._hasher.record()

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._emit(memoryview(pending))

    def _emit(self, view: memoryview) -> None:
        while len(view) > 0:
            piece = view[:_WRITE_BYTES]
            try:
                self._trace("write", self.path, piece)
                written = os.write(self._fd, piece)
            except OSError as error:
                raise self._failed(error) from error
            self._hasher.update(piece[:written])
            view = view[written:]

    def _failed(self, error: OSError) -> CheckpointError:
        total = "" if self._total_bytes is None else f" of {self._total_bytes:,}"
        return CheckpointError(
            f"could not write {self.path}: {error.strerror or error} after {self._hasher.bytes:,}{total} bytes"
            f"{_free_bytes(self.path.parent)}. {_advice(error)}",
            path=self.path,
        )


class LocalFiles:
    """The operations of a store on a file system with an atomic rename.

    Args:
        trace: called before each operation with its name (mkdir, create, write, fsync, fsync_folder, rename, unlink,
            rmdir), its path, and the bytes of a write or the target of a rename. What it raises, the operation raises.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace

    def _before(self, operation: str, path: Path, detail: Any = None) -> None:
        if self.trace is not None:
            self.trace(operation, path, detail)

    def create(self, path: Path, total_bytes: int | None = None) -> OutFile:
        """A new file to write to."""
        return OutFile(path, total_bytes, self._before)

    def write_file(self, path: Path, data: Data) -> FileRecord:
        """A new file with this content, on the disk when this returns."""
        with self.create(path, len(data)) as out:
            out.write(data)
            return out.close()

    def take_in(self, path: Path) -> FileRecord:
        """The record of a file that somebody else wrote, which is on the disk when this returns."""
        self._before("fsync", path)
        with open(path, "rb") as file:
            _fsync(file.fileno())
        return hash_file(path)

    def make_folder(self, path: Path) -> None:
        """A new folder."""
        self._before("mkdir", path)
        path.mkdir()

    def make_root(self, path: Path) -> None:
        """A folder and its parents where they are missing, each one on the disk."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            self._before("mkdir", folder)
            folder.mkdir(exist_ok=True)
            self.sync_folder(folder.parent)

    def sync_folder(self, path: Path) -> None:
        """Wait until the disk has the folder's entries."""
        self._before("fsync_folder", path)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that knows no fsync of folders
                raise
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a folder another name on the same file system, at one instant."""
        self._before("rename", old, new)
        os.rename(old, new)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all that it holds; nothing happens where it is gone."""
        for folder, folders, names in os.walk(path, topdown=False):
            for name in names:
                self._before("unlink", Path(folder, name))
                Path(folder, name).unlink(missing_ok=True)
            for name in folders:  # os.walk lists links to folders here and does not enter them
                if Path(folder, name).is_symlink():
                    Path(folder, name).unlink(missing_ok=True)
            self._before("rmdir", Path(folder))
            os.rmdir(folder)


def _fsync(fd: int) -> None:
    try:
        import fcntl  # late: not on every platform
    except ImportError:
        os.fsync(fd)
        return
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync leaves the data in the drive's cache
    if full is not None:
        fcntl.fcntl(fd, full)
    else:
        os.fsync(fd)


def _free_bytes(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free:,} bytes are free there)"
    except OSError:
        return ""


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, or keep fewer checkpoints; the older ones are intact."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Give this user the right to write there, or choose another folder."
    if error.errno == errno.ENOENT:
        return "The folder has vanished; with several nodes it must be on a file system that all of them share."
    return "The older checkpoints are intact."
