"""File operations of a checkpoint store on an object store, or on any other file system that fsspec supports.

Object stores cannot rename. So files are written directly into their final folder, whose name no other save has, and
the manifest is written last. A folder without a manifest does not count as a checkpoint. Its file `.owner`, which names
the process that writes there, is written first and removed last. instep never removes a folder without a manifest and
without `.owner`, since another program may have made it.
"""

from __future__ import annotations

import errno
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from instep.checkpoint import names
from instep.checkpoint.files import Files, LocalFiles
from instep.checkpoint.hashing import FileRecord, Hasher, OutFile
from instep.utils.process_id import is_gone, this_process
from instep.utils.untrusted_files import LEASE_BYTES
from instep.utils.warn import warn_user

_OWNER = ".owner"
_PART_BYTES = 32 * 2**20  # size of a part of a multi-part upload; about three parts are in memory
_MOST_PARTS = 9_000  # limit for the number of parts of a multi-part upload; S3 allows 10,000
_RANGE_BYTES = 16 * 2**20  # size of a part of a download
_AHEAD = 4  # number of parts of a download that are read ahead


def files_of(path: Path) -> Files:
    """Return the `Files` object for the file system of a path: local, or remote by fsspec."""
    return LocalFiles() if isinstance(path, Path) else RemoteFiles()


class RemoteFiles(Files):
    """File operations of a checkpoint store on a file system of fsspec, with paths of the class `upath.UPath`.

    The function `trace` is called with the operations create, write, close (the end of an upload), put (a small object
    in one request) and unlink.
    """

    def create(self, path: Path, total_bytes: int | None = None) -> OutFile:
        return _RemoteOut(path, total_bytes, self._before)

    def size(self, path: Path) -> int:
        with _as_os_error(path):
            return int(_fs(path).info(_key(path))["size"])

    def hash(self, path: Path) -> FileRecord:
        hasher = Hasher()
        for piece in self._pieces(path):
            hasher.update(piece)
        return hasher.record()

    def read_range(self, path: Path, begin: int, end: int) -> bytearray:
        try:
            with _as_os_error(path):
                return bytearray(_fs(path).cat_file(_key(path), start=begin, end=end))
        except OSError:
            if self.size(path) == 0:  # some stores refuse to read a range of an empty file
                return bytearray()
            raise

    @contextmanager
    def fetched(self, path: Path, check: bool) -> Iterator[tuple[Path, FileRecord | None]]:
        """Download an object to a temporary file, and yield its path and checksums; `TMPDIR` chooses the folder."""
        with tempfile.NamedTemporaryFile(prefix="instep-", suffix=path.suffix) as file:
            hasher = Hasher()
            for piece in self._pieces(path):
                hasher.update(piece)
                file.write(piece)
            file.flush()
            yield Path(file.name), hasher.record()

    def entries(self, folder: Path) -> dict[str, bool]:
        try:
            with _as_os_error(folder):
                found = _fs(folder).ls(_key(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {PurePosixPath(entry["name"]).name: entry["type"] == "directory" for entry in found}

    def sizes(self, folder: Path) -> dict[str, int]:
        with _as_os_error(folder):
            found = _fs(folder).find(_key(folder), detail=True)
        start = _key(folder).rstrip("/") + "/"
        return {name.removeprefix(start): int(entry["size"]) for name, entry in found.items()}

    def begin(self, final: Path) -> Path:
        if not self.create_exclusive(final / _OWNER, this_process().encode()):
            raise FileExistsError(errno.EEXIST, "another save has taken this name", str(final))
        return final

    def publish(self, folder: Path, final: Path, manifest: bytes) -> None:
        self.replace(final / names.MANIFEST, manifest)

    def delete(self, folder: Path) -> None:
        found = self.sizes(folder).keys()
        if not found:
            return
        self.replace(folder / _OWNER, b"")  # an empty `.owner` lets any run remove the remaining files
        for some in (found & {names.MANIFEST}, found - {names.MANIFEST, _OWNER}, {_OWNER}):
            for name in sorted(some):
                self._before("unlink", folder / name)
            self._remove(folder, sorted(some))

    def leftovers(self, root: Path) -> list[tuple[Path, bool | None]]:
        inside: dict[str, set[str]] = {}
        for name in self.sizes(root):
            folder, _, file = name.partition("/")
            inside.setdefault(folder, set()).add(file)
        found: list[tuple[Path, bool | None]] = []
        for folder, files in sorted(inside.items()):
            if _OWNER in files and names.MANIFEST not in files:
                owner = self.read(root / folder / _OWNER, LEASE_BYTES).decode(errors="replace")
                found.append((root / folder, is_gone(owner) if owner else True))
        return found

    def create_exclusive(self, path: Path, data: bytes) -> bool:
        """Create a new object with this content; return False if the object exists.

        If the store has conditional puts (S3 since 2024, Google, Azure, newer MinIO, and fsspec's memory file system
        within one process), only one of several callers succeeds. On other stores the existence is checked first, so
        that two callers at the same time may both succeed.
        """
        self._before("put", path)
        try:
            with _as_os_error(path):
                _fs(path).pipe_file(_key(path), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            with _as_os_error(path):
                if _fs(path).exists(_key(path)):
                    return False
                _fs(path).pipe_file(_key(path), data)
        return True

    def replace(self, path: Path, data: bytes) -> None:
        """Create or replace an object atomically."""
        self._before("put", path)
        with _as_os_error(path):
            _fs(path).pipe_file(_key(path), data)

    def remove(self, path: Path) -> None:
        self._before("unlink", path)
        try:
            with _as_os_error(path):
                _fs(path).rm_file(_key(path))
        except FileNotFoundError:
            pass  # nothing to do, since the object does not exist any more

    def _pieces(self, path: Path) -> Iterator[bytes]:
        """Yield the content of an object in order, while some further ranges are read in the background."""
        fs, key, size = _fs(path), _key(path), self.size(path)

        def ask(start: int) -> bytes:
            with _as_os_error(path):
                return fs.cat_file(key, start=start, end=min(start + _RANGE_BYTES, size))

        with ThreadPoolExecutor(_AHEAD) as pool:
            coming: deque[Future[bytes]] = deque()
            for start in range(0, size, _RANGE_BYTES):
                coming.append(pool.submit(ask, start))
                if len(coming) == _AHEAD:
                    yield coming.popleft().result()
            for last in coming:
                yield last.result()

    def _remove(self, folder: Path, some: list[str]) -> None:
        keys = [_key(folder / name) for name in some]
        with _as_os_error(folder):
            if len(keys) > 1 and not any(set("*?[") & set(key) for key in keys):
                _fs(folder).rm(keys)  # passed as a list, so that many objects need one request
                return
            for key in keys:  # deleted one by one, since fsspec takes these characters in a list for patterns
                _fs(folder).rm_file(key)


class _RemoteOut(OutFile):
    """A new object, written by a multi-part upload of fsspec; after an error, the whole upload is abandoned."""

    _file: Any = None

    def _open(self) -> None:
        part = max(_PART_BYTES, (self._total_bytes or 0) // _MOST_PARTS)
        with _as_os_error(self.path):
            self._file = _fs(self.path).open(_key(self.path), "wb", block_size=part)

    def _write(self, piece: memoryview) -> int:
        with _as_os_error(self.path):
            written = self._file.write(piece)
        return len(piece) if written is None else written  # SFTP returns None after it has written all bytes

    def _finish(self) -> None:
        self._trace("close", self.path, None)
        with _as_os_error(self.path):
            self._file.close()
        self._file = None

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with _as_os_error(self.path):
                file.discard()
        except (OSError, AttributeError) as error:
            warn_user(
                f"the upload of {self.path} failed, and could not be given up either: {error}. A lifecycle "
                "rule of the bucket removes unfinished uploads."
            )
        finally:
            # Prevent fsspec from completing the upload when the file object is garbage collected.
            if hasattr(file, "blocksize"):
                file.closed = True


def _fs(path: Any) -> Any:
    return path.fs


def _key(path: Any) -> str:
    return path.path


@contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Convert errors of an object store's library to OSErrors."""
    try:
        yield
    except (MemoryError, AttributeError, TypeError, NameError):
        raise  # not converted, since it is an error in instep's own code
    except Exception as error:
        # Keep an OSError that has an errno. Some libraries raise one without it, which is converted below.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise OSError(_number(error), f"{type(error).__name__}: {error}", str(path)) from error


def _number(error: Exception) -> int:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    for kind, number in _NUMBERS.items():
        if kind in kinds:
            return number
    return errno.EINVAL


_NUMBERS = {
    "FileNotFoundError": errno.ENOENT,
    "FileExistsError": errno.EEXIST,
    "PermissionError": errno.EACCES,
    "IsADirectoryError": errno.EISDIR,
    "NotADirectoryError": errno.ENOTDIR,
    "TimeoutError": errno.ETIMEDOUT,
    "HTTPClientError": errno.ETIMEDOUT,  # class of botocore for failed connections, timeouts, incomplete answers
    "ClientConnectionError": errno.ECONNABORTED,  # class of aiohttp
    "ClientPayloadError": errno.ECONNABORTED,
    "ConnectionError": errno.ECONNABORTED,  # class of Python, and of the package requests
    "BlockingIOError": errno.EAGAIN,
}
