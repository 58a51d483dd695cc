"""Output files of loggers to which records are only appended: CSV rows, JSON lines, TensorBoard events."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import UsageError
from instep.utils.atomic import replacing
from instep.utils.untrusted_files import open_regular

if TYPE_CHECKING:
    from instep.loggers.backlog import Record, RowKey


class AppendedFile:
    """File to which a logger's thread appends; each append is written completely or not at all.

    Several loggers may append to the same file; a file lock keeps them apart. A symbolic link is refused, and a file
    with a second hard link is replaced by a copy first, since its other name may be outside of the run folder.

    Args:
        path: path of the file, which is created if it is missing.

    Raises:
        UsageError: the file is a symbolic link.
        OSError: the file cannot be written, or is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_shared = False
        """Whether another writer has changed the file since it was opened."""
        self._lock = threading.Lock()
        self._stopped = False
        self._fd = -1
        check_no_link(path)
        if path.exists() and path.stat().st_nlink > 1:
            with open_regular(path) as file, replacing(path, sync=False) as part, part.open("wb") as copy:
                shutil.copyfileobj(file, copy)
        self._open()
        self._left = self._state()

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Lock the file for a `with` block; yield True if another logger has changed it since the last call."""
        self._take_turn(True)
        try:
            while not self._is_at_path():  # another logger has put a new file at the path
                self._take_turn(False)
                self.close()
                self._open()
                self._take_turn(True)
            changed = self._left is not None and self._left != self._state()
            self.is_shared |= changed
            yield changed
        finally:
            self._left = self._state()
            self._take_turn(False)

    def append(self, data: bytes) -> None:
        """Append bytes to the file.

        Raises:
            UsageError: `stop` was called.
            OSError: the disk cannot hold all the bytes; the file is left as before.
        """
        with self._going():
            end, left = os.fstat(self._fd).st_size, memoryview(data)
            try:
                while left:
                    left = left[os.write(self._fd, left) :]
            except OSError:
                os.ftruncate(self._fd, end)
                raise

    @contextmanager
    def replacing(self) -> Iterator[Path]:
        """Replace the file: yield a temporary path to write to, which is renamed to the file after the `with` block."""
        with self._going():
            with replacing(self.path, sync=False) as part:
                yield part
            self.close()
            self._open()
            self._take_turn(True)

    def stop(self, timeout_s: float = 1.0) -> None:
        """Make every further `append` raise an error, and wait for an append in progress."""
        self._stopped = True
        if self._lock.acquire(timeout=timeout_s):
            self._lock.release()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def _going(self) -> Iterator[None]:
        with self._lock:
            if self._stopped:
                raise UsageError(f"{self.path} is closed")
            yield

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._fd = os.open(self.path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    def _state(self) -> tuple[int, int] | None:
        with suppress(OSError):
            state = os.fstat(self._fd)
            return state.st_ino, state.st_size
        return None

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _take_turn(self, begins: bool) -> None:
        with suppress(ImportError, OSError):  # there are no locks on Windows and some file systems
            import fcntl

            fcntl.flock(self._fd, fcntl.LOCK_EX if begins else fcntl.LOCK_UN)


class OutputFile:
    """Output file of a logger, as `Delivery` uses it. The base class is used for a logger that writes no file."""

    appended: AppendedFile | None = None
    later_rows: Sequence[RowKey] = ()
    """Keys of rows that were written after the checkpoint and are kept: the resumed run does not write them again."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "appended": None}  # an open file cannot be copied

    @property
    def opened(self) -> AppendedFile:
        """The open file; an AssertionError if it is closed."""
        assert self.appended is not None
        return self.appended

    def is_due(self, first: Record, last: Record) -> bool:
        """Return True if the waiting records must be written now, although they do not fill a batch."""
        return True

    def holds(self, record: Record) -> bool:
        """Return True if the file already contains a record that an earlier process has left in the backlog."""
        return False

    def row_count(self) -> int | None:
        """Return the number of rows in a file that has one row per record; None for other files, or if unknown."""
        return None

    def stop(self) -> None:
        """Prevent any further write to the file."""
        if self.appended is not None:
            self.appended.stop()


def check_no_link(path: Path) -> None:
    """Raise an error if a file is a symbolic link.

    Raises:
        UsageError: the file is a link.
    """
    if os.path.islink(path):
        raise UsageError(f"{path} is a link to {os.readlink(path)}: what is logged would be written there. Remove it.")
