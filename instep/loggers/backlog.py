"""Records of a logger that wait to be sent: the older ones in a file, the newer ones in memory."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from instep.loggers.kinds import from_json, size_of, to_json
from instep.utils.atomic import replacing
from instep.utils.untrusted_files import INDEX_BYTES, open_regular, parse_object, read_regular
from instep.utils.warn import warn_user

QUEUE_RECORDS = 2_000  # so that writing all of them into the file holds up a step by milliseconds
BATCH = 500
_QUEUE_BYTES = 32 * 2**20
_LOST_BYTES = 16 * _QUEUE_BYTES  # where the disk takes nothing either
_DISK_PAUSE_S = 5.0  # until a disk that took nothing is asked again: each time costs the writing of the whole queue
_MOST_LINE_BYTES = 512 * 2**20
_READ_BYTES = 2**20  # a group that is read holds up who appends
_HOOKS = ("_log_", "_after_save_checkpoint")


class Record(NamedTuple):
    """One call of a logger's hook that waits; `step` is the global one, None where there is none."""

    hook: str
    args: tuple[Any, ...]
    step: int | None
    time_s: float

    def names(self) -> list[str]:
        """List the names that the record is about: of its metrics, else of its hook and value."""
        if self.hook == "_log_metrics":
            return list(self.args[0])
        return [f"{self.hook}:{self.args[0]}"] if self.step is not None and isinstance(self.args[0], str) else []

    def line(self) -> bytes:
        """Return the record as a line of JSON; what JSON does not have, such as a path on an object store, as text."""
        return json.dumps([self.hook, to_json(self.args), self.step, self.time_s], default=str).encode() + b"\n"

    @staticmethod
    def of_line(line: bytes) -> Record:
        """Read what `line` gave.

        Raises:
            ValueError: it is no record.
        """
        match json.loads(line):
            case [str(hook), list(args), int() | None as step, float() | int() as time_s] if hook.startswith(_HOOKS):
                return Record(hook, tuple(map(from_json, args)), step, time_s)
        raise ValueError(f"{line[:80]!r} is no record of a logger")


class Row(NamedTuple):
    """Metrics of one `log_metrics` call: numbers by name, the place on the x-axis, and seconds since 1970."""

    metrics: dict[str, float]
    step: int
    time_s: float


class Backlog:
    """Records that wait, in their order: the older ones in a file, the newer ones in memory. Safe between threads.

    A line of the file whose record has arrived loses its first character, so that a process that is killed leaves in it
    only what waits.

    Args:
        path: of the file, made where it is needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        """Records that neither the memory nor the disk could take."""
        self._memory: deque[Record] = deque()
        self._bytes = 0
        self._gone = 0  # of the records that `peek` returned, those that were lost since then
        self._file: BinaryIO | None = None
        self._in_file = 0
        self._offset = 0  # of the first record that waits in the file
        self._end = 0  # of the last one
        self._next_spill_s = 0.0
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._in_file + len(self._memory)

    def append(self, record: Record) -> bool:
        """Add a record; return whether so many wait that they should be sent now."""
        with self._lock:
            self._memory.append(record)
            self._bytes += size_of(record.args)
            full = len(self._memory) >= QUEUE_RECORDS or self._bytes >= _QUEUE_BYTES
            if (full or self._is_closed) and time.monotonic() >= self._next_spill_s:
                self._spill(sync=False)
            return full or len(self._memory) == BATCH

    def peek(self, most: int) -> list[Record]:
        """Return the first records; a line of the file that is no record is left out."""
        with self._lock:
            self._gone = 0
            found: list[Record] = []
            while self._in_file and not found:
                found = self._read(most)
            return found or list(islice(self._memory, most))

    def drop(self, number: int) -> None:
        """Take the first records away, of those that `peek` returned last: they have arrived."""
        with self._lock:
            gone, self._gone = min(number, self._gone), 0
            self.lost -= gone
            if self._in_file:  # also where they were spilled after `peek`
                self._skip(number - gone)
            else:
                for _ in range(number - gone):
                    self._bytes -= size_of(self._memory.popleft().args)

    def spill(self, sync: bool = True) -> None:
        """Write the records in memory into the file.

        Args:
            sync: wait until the disk has it.
        """
        with self._lock:
            self._spill(sync)

    def take_over(self, keep: Callable[[Record], bool]) -> int:
        """Put in front what an earlier process left in the file, as far as `keep` says.

        Called once, before the first `peek`. What was spilled until then stays, behind it.

        Returns:
            how many records were kept.
        """
        with self._lock:
            try:
                source = BufferedReader(open_regular(self.path))
            except FileNotFoundError:
                return 0
            kept, is_ours = 0, self._file is not None
            with source, replacing(self.path, sync=False) as part, open(part, "wb", opener=_private) as out:
                left = self._offset if is_ours else os.fstat(source.fileno()).st_size
                while line := source.readline(min(left, _MOST_LINE_BYTES)):
                    left -= len(line)
                    with suppress(ValueError, TypeError, RecursionError):  # a process killed while writing leaves half
                        if keep(Record.of_line(line)):
                            out.write(line.rstrip(b"\n") + b"\n")
                            kept += 1
                if is_ours:
                    shutil.copyfileobj(source, out)
            if self._file is not None:
                self._file.close()
                self._file = None
            self._opened()
            self._in_file, self._offset = self._in_file + kept, 0
            return kept

    def close(self) -> None:
        """Close the file, and delete it where nothing waits. A later record is written into it at once."""
        with self._lock, suppress(OSError):
            self._is_closed = True
            if self._file is not None:
                if not self._in_file and self._is_ours(self._file):
                    self.path.unlink(missing_ok=True)
                _lock_file(self._file.fileno(), False)  # a forked process may have the descriptor, and the lock with it
                self._file.close()
                self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._file = os.fdopen(descriptor, "r+b")
            _lock_file(descriptor, True)
            self._offset = self._end = self._file.seek(0, os.SEEK_END)  # behind what an earlier process left
        return self._file

    def _is_ours(self, file: BinaryIO) -> bool:
        """Return whether nobody else has written into the file, as the next thread does while a tracker hangs."""
        return os.fstat(file.fileno()).st_size == self._end

    def _spill(self, sync: bool) -> None:
        data = memoryview(b"".join(record.line() for record in self._memory))
        try:
            file = self._opened() if data else self._file
            if file is None:
                return
            # Not by `file`: what a full disk refuses would stay in its buffer, and come a second time.
            descriptor, done = file.fileno(), 0
            try:
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], self._end + done)
                if sync:
                    os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._end)
                raise
        except OSError as error:
            self._next_spill_s = time.monotonic() + _DISK_PAUSE_S
            self._make_room(error)
            return
        self._end += len(data)
        self._in_file += len(self._memory)
        self._memory.clear()
        self._bytes = 0

    def _make_room(self, error: OSError) -> None:
        """Keep in memory what the disk does not take, up to a limit."""
        if self._bytes < _LOST_BYTES and len(self._memory) < 100 * QUEUE_RECORDS:
            return
        if not self.lost:
            warn_user(f"{self.path} cannot be written ({error}), and the memory for it is full: the oldest are lost")
        while self._memory and (self._bytes > _LOST_BYTES // 2 or len(self._memory) > 50 * QUEUE_RECORDS):
            self._bytes -= size_of(self._memory.popleft().args)
            self._gone += not self._in_file
            self.lost += 1

    def _read(self, most: int) -> list[Record]:
        found: list[Record] = []
        file = self._opened()
        file.seek(self._offset)
        for _ in range(min(most, self._in_file)):
            if file.tell() - self._offset > _READ_BYTES:
                break
            try:
                found.append(Record.of_line(file.readline(_MOST_LINE_BYTES)))
            except (ValueError, TypeError, RecursionError):
                if not found:
                    self.lost += 1
                    self._skip(1)
                break
        return found

    def _skip(self, number: int) -> None:
        file = self._opened()
        file.seek(self._offset)
        number = min(number, self._in_file)
        for _ in range(number):
            at = file.tell()
            file.readline()
            with suppress(OSError):
                os.pwrite(file.fileno(), b"\n", at)
        self._in_file -= number
        self._offset = file.tell()
        if not self._in_file and self._is_ours(file):
            file.truncate(0)
            self._offset = self._end = 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _lock_file(descriptor: int, locked: bool) -> None:
    with suppress(ImportError, OSError):  # Windows; a file system without locks
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if locked else fcntl.LOCK_UN)


def read_note(path: Path) -> dict[str, Any]:
    """Read the file that stands beside a logger's backlog; {} where there is none that can be read."""
    with suppress(OSError, ValueError):
        return parse_object(read_regular(path, INDEX_BYTES))
    return {}
