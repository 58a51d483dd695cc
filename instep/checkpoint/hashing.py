"""Compute sizes and checksums of files, for new files while they are written."""

from __future__ import annotations

import errno
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from instep.errors import CheckpointError
from instep.utils.untrusted_files import open_regular

CHUNK_BYTES = 64 * 2**20  # a large file has a checksum for each chunk of this size

Data: TypeAlias = "bytes | bytearray | memoryview"

_BUFFER_BYTES = 2**20  # smaller writes are collected up to this size
_WRITE_BYTES = 16 * 2**20  # largest size of a write call

Trace: TypeAlias = "Callable[[str, Path, Any], None]"


@dataclass(frozen=True)
class FileRecord:
    """Size and checksums of a file.

    Args:
        bytes: size of the file.
        xxh3: xxh3-128 checksum in hex. A file up to 64 MiB has the checksum of its content. A larger file has the
            checksum of the joined checksums of its chunks, so that one pass over the data is enough.
        chunks: xxh3-128 checksum in hex of each chunk of 64 MiB; empty for a file of one chunk.
    """

    bytes: int
    xxh3: str
    chunks: tuple[str, ...] = ()


class Hasher:
    """Compute size and checksums of a file whose content is passed in order, piece by piece."""

    def __init__(self) -> None:
        import xxhash  # imported late: `instep.trainer` imports this module, and most programs compute no checksum

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
    """Return the xxh3-128 checksum of bytes in hex."""
    import xxhash  # imported late: most programs compute no checksum

    return xxhash.xxh3_128(data).hexdigest()


def hash_file(path: Path) -> FileRecord:
    """Read a file, and return its size and checksums."""
    hasher = Hasher()
    buffer = memoryview(bytearray(4 * 2**20))
    with open_regular(path) as file:
        while size := file.readinto(buffer):
            hasher.update(buffer[:size])
    return hasher.record()


class OutFile(ABC):
    """A new file whose checksums are computed while it is written; after `close` it is on the disk.

    Args:
        path: path of the file, which must not exist.
        total_bytes: number of bytes that will be written, for error messages; None if unknown.
        trace: function for tests that is called before each operation; see `Files`.
    """

    def __init__(self, path: Path, total_bytes: int | None, trace: Trace) -> None:
        self.path = path
        self._total_bytes = total_bytes
        self._trace = trace
        self._hasher = Hasher()
        self._written = 0
        self._pending = bytearray()
        try:
            trace("create", path, None)
            self._open()
        except FileExistsError as error:
            raise CheckpointError(
                f"{path} was written twice in one save. Give each rank's file a name of its own.", path=path
            ) from error
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> OutFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()

    def write(self, data: Data) -> None:
        """Append bytes, given as any contiguous buffer."""
        view = memoryview(data).cast("B")
        if len(view) >= _BUFFER_BYTES:
            self._flush()
            self._emit(view)
        else:
            self._pending += view
            if len(self._pending) >= _BUFFER_BYTES:
                self._flush()

    def close(self) -> FileRecord:
        """Write the buffered bytes, and wait until the file is on the disk.

        Returns:
            Size and checksums of the file.
        """
        self._flush()
        try:
            self._finish()
        except OSError as error:
            raise self._failed(error) from error
        return self._hasher.record()

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _write(self, piece: memoryview) -> int:
        """Write bytes from the beginning of `piece`; return the number of bytes that were written."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait until the whole file is on the disk, and close it."""

    @abstractmethod
    def _abandon(self) -> None:
        """Close an unfinished file after an error; the store removes the whole folder later."""

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._emit(memoryview(pending))

    def _emit(self, view: memoryview) -> None:
        if len(view) < _WRITE_BYTES:
            self._hasher.update(view)
            self._write_all(view)
            return
        # Compute checksums on another thread during the write: one after the other would take a fifth longer.
        hashing = threading.Thread(target=self._hasher.update, args=(view,), name="instep-hash")
        hashing.start()
        try:
            self._write_all(view)
        finally:
            hashing.join()

    def _write_all(self, view: memoryview) -> None:
        while len(view) > 0:
            piece = view[:_WRITE_BYTES]
            try:
                self._trace("write", self.path, piece)
                written = self._write(piece)
            except OSError as error:
                raise self._failed(error) from error
            self._written += written
            view = view[written:]

    def _failed(self, error: OSError) -> CheckpointError:
        total = "" if self._total_bytes is None else f" of {self._total_bytes:,}"
        return CheckpointError(
            f"could not write {self.path}: {error.strerror or error} after {self._written:,}{total} bytes"
            f"{_free_bytes(self.path.parent)}. {_advice(error)}",
            path=self.path,
        )


def _free_bytes(folder: Path) -> str:
    if not isinstance(folder, Path):  # an object store, whose free space is unlimited
        return ""
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
