"""The queue of a logger's records that wait to be sent: the older ones in a file, the newer ones in memory."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from instep.loggers.kinds import from_json, size_of, to_json
from instep.utils.atomic import replacing
from instep.utils.private_files import Seal
from instep.utils.untrusted_files import INDEX_BYTES, clean, open_regular, parse_object, read_regular
from instep.utils.warn import warn_user

# Largest number of records in memory. They are moved to the file all at once; moving more would delay a training step
# by milliseconds.
QUEUE_RECORDS = 2_000
BATCH = 500
_QUEUE_BYTES = 32 * 2**20
_LOST_BYTES = 16 * _QUEUE_BYTES  # limit for the records in memory while the disk is full
_DISK_PAUSE_S = 5.0  # seconds between attempts on a full disk, since each attempt writes the whole queue
_MOST_LINE_BYTES = 512 * 2**20
_READ_BYTES = 2**20  # bytes to read at a time; `append` waits during a read
_HOOKS = ("_log_", "_after_save_checkpoint")
_WITHOUT_ROW = ("_log_artifact", "_log_checkpoint", "_log_code", "_after_save_checkpoint")
_MARK = b', "'  # text before the last item of a line, which is a MAC that proves that this user wrote the line
_ENCODER = json.JSONEncoder(default=str)  # one encoder for all lines: `json.dumps` would make one for each line


class Record(NamedTuple):
    """A call of a logger's hook that waits to be made; `step` is the global step, or None if the call has none."""

    hook: str
    args: tuple[Any, ...]
    step: int | None
    time_s: float
    row: int | None = None
    """Index of the record's row in the logger's file; None if the record makes no row or the logger counts no rows."""

    @property
    def rows(self) -> int:
        """Number of rows that the record adds to an output file with rows: 0 or 1."""
        if self.hook == "_log_metrics":
            return 1
        if self.hook == "_log_hyperparams":
            return int(len(self.args) > 1 and bool(self.args[1]))
        return int(self.hook not in _WITHOUT_ROW)

    def names(self) -> list[str]:
        """Return the names of the record's metrics; for other values, its hook and the name of its value."""
        if self.hook == "_log_metrics":
            return list(self.args[0].keys())
        return [f"{self.hook}:{self.args[0]}"] if self.step is not None and isinstance(self.args[0], str) else []

    def line(self, seal: Seal | None = None) -> bytes:
        """Return the record as a line of JSON; a value that JSON cannot hold, such as a remote path, becomes a string.

        Args:
            seal: adds a message authentication code (MAC), which proves that this user wrote the line. None: no MAC.
        """
        data = _ENCODER.encode([self.hook, to_json(self.args), self.step, self.time_s, self.row]).encode()
        return b'%s, "%s"]\n' % (data[:-1], b"" if seal is None else seal.mark(data).encode())

    @staticmethod
    def of_line(line: bytes) -> Record:
        """Read a record from a line of JSON, as the method `line` writes it.

        Raises:
            ValueError: the line does not hold a record.
        """
        try:
            return Record._of(json.loads(line))
        except (TypeError, LookupError, AttributeError, RecursionError, MemoryError, EOFError, OSError) as error:
            raise ValueError(f"{line[:80]!r} is no record of a logger: {error}") from error

    @staticmethod
    def _of(value: Any) -> Record:
        match value:
            case [str(hook), list(args), int() | None as step, float() | int() as time_s, *rest] if (
                hook.startswith(_HOOKS) and len(rest) <= 2
            ):
                row = rest[0] if rest and type(rest[0]) is int else None
                record = Record(hook, tuple(map(from_json, args)), step, time_s, row)
                record.names()
                return record
        raise ValueError(f"{value!r:.80} is no record of a logger")


def is_own(line: bytes, seal: Seal | None) -> bool:
    """Return True if a line of a backlog file ends with a MAC of this user, which proves who wrote the line."""
    data, _, mark = line.rstrip().rpartition(_MARK)
    return seal is not None and seal.is_own(data + b"]", mark.decode(errors="replace").removesuffix('"]'))


class Row(NamedTuple):
    """The metrics of one `log_metrics` call: numbers by name, the x-axis position, and seconds since 1970."""

    metrics: dict[str, float]
    step: int
    time_s: float


class RowKey(NamedTuple):
    """Step and metric names of a row in an output file, by which the row is recognized."""

    step: float
    names: frozenset[str]

    @staticmethod
    def of_record(record: Record) -> RowKey:
        """Return the key of the row that a record adds to an output file."""
        own_step = record.args[0].get("step", record.step) if record.hook == "_log_metrics" else record.step
        names = (written_name(name) for name in record.names() if name != "step")
        return RowKey(float(own_step or 0), frozenset(names))


_KEPT = "\n\t\u00a0\u2002\u2003\u2009\u202f\u3000\u200d"  # white space and joiners, which are kept in names


def written_name(name: str) -> str:
    """Escape the characters of a metric's name that UTF-8 cannot encode or that control a terminal."""
    return name if name.isprintable() else clean(name, _KEPT)


class Backlog:
    """Queue of records that wait to be sent: the older ones in a file, the newer ones in memory. Thread-safe.

    When a record has been sent, the first character of its line in the file is overwritten. So after a kill, the valid
    lines of the file are the records that still wait.

    Args:
        path: path of the file, which is created when it is needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_many = threading.Event()
        """Event that is set when so many records wait that they should be sent now."""
        self.find_seal: Callable[[], Seal | None] = lambda: None
        self.announce: Callable[[], None] = lambda: None
        """Function that is called before the backlog's file is created."""
        self.note: Path | None = None
        """File that is deleted together with the backlog's file."""
        self.refuses: Callable[[Record], bool] = lambda record: False
        """Returns whether to refuse a record; called for records in the file that have no MAC of this user."""
        self.refused = 0
        """Number of records that were moved into the file of refused records."""
        self.place: int | None = None
        """Number of rows in the logger's file before the first waiting record; None if the logger counts no rows."""
        self._next_row: int | None = None  # row of the next record in memory, if other records wait in the file
        self.lost = 0
        """Number of records that were lost because neither the memory nor the disk had room for them."""
        self._memory: deque[Record] = deque()
        self._bytes = 0
        # number of records that were dropped for lack of memory since the last `peek`; if `drop` says that they have
        # been sent, they do not count as lost
        self._gone = 0
        self._file: BinaryIO | None = None
        self._in_file = 0
        self._offset = 0  # byte position in the file of the first waiting record
        self._end = 0  # byte position in the file after the last record
        self._next_spill_s = 0.0
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._in_file + len(self._memory)

    def append(self, record: Record) -> None:
        """Add a record at the end of the queue."""
        with self._lock:
            self._memory.append(record)
            self._bytes += size_of(record.args)
            full = len(self._memory) >= QUEUE_RECORDS or self._bytes >= _QUEUE_BYTES
            if (full or self._is_closed) and time.monotonic() >= self._next_spill_s:
                self._spill(sync=False)
            if full or len(self._memory) == BATCH:
                self.is_many.set()

    def peek(self, most: int) -> list[Record]:
        """Return up to `most` first records without removing them; lines of the file without a record are left out."""
        with self._lock:
            self._gone = 0
            found: list[Record] = []
            while self._in_file and not found:
                found = self._read(most)
            return found or list(islice(self._memory, most))

    def few(self) -> tuple[Record, Record] | None:
        """Return the first and the last record if all records are in memory and do not fill a batch; else None."""
        with self._lock:
            few = not self._in_file and 0 < len(self._memory) < BATCH
            return (self._memory[0], self._memory[-1]) if few else None

    def drop(self, number: int, place: int | None = None) -> None:
        """Remove records from the front of the queue, after they have been sent.

        Args:
            number: number of records to remove, of those that the last `peek` returned.
            place: number of rows in the logger's output file now; None if they are not counted.
        """
        with self._lock:
            self.place = place
            gone, self._gone = min(number, self._gone), 0
            self.lost -= gone
            if self._in_file:  # the records may have been moved to the file since `peek`
                self._skip(number - gone)
            else:
                for _ in range(number - gone):
                    self._bytes -= size_of(self._memory.popleft().args)

    def spill(self, sync: bool = True) -> None:
        """Move the records from memory to the file.

        Args:
            sync: whether to wait (fsync) until the file is on the disk.
        """
        with self._lock:
            self._spill(sync)

    def take_over(self, keep: Callable[[Record], bool], place: int | None = None) -> int:
        """Put the records that an earlier process left in the file at the front of the queue.

        Called once, before the first `peek`. Records that this process has already written to the file come after them.

        Args:
            keep: function that returns True for a record that must still be sent.
            place: number of rows in the logger's output file; None if they are not counted.

        Returns:
            The number of records that were put in front.
        """
        with self._lock:
            self.place = self._next_row = place
            try:
                source = BufferedReader(open_regular(self.path))
            except FileNotFoundError:
                return 0
            kept, is_ours = 0, self._file is not None
            with source, replacing(self.path, sync=False) as part, open(part, "wb", opener=_private) as out:
                left = self._offset if is_ours else os.fstat(source.fileno()).st_size
                while line := source.readline(min(left, _MOST_LINE_BYTES)):
                    left -= len(line)
                    with suppress(ValueError):  # a process killed while writing may leave an incomplete line
                        record, own = Record.of_line(line), is_own(line, self.seal)
                        if not keep(record):
                            continue
                        if own or not self.refuses(record):
                            out.write(self._numbered(record).line(self.seal if own else None))
                            kept += 1
                        else:
                            self.refuse(record)
                if is_ours:
                    shutil.copyfileobj(source, out)
                    self._next_row = None  # the copied lines have no row index, so later records get no index
            if self._file is not None:
                self._file.close()
                self._file = None
            self._opened()
            self._in_file, self._offset = self._in_file + kept, 0
            return kept

    @cached_property
    def seal(self) -> Seal | None:
        """Object that adds a MAC to each line, to prove that this user wrote it; None if lines get no MAC."""
        return self.find_seal()

    def refuse(self, record: Record, seal: Seal | None = None) -> None:
        """Write a record to the file of refused records: the tracker does not accept it, or it must not be sent."""
        self.refused += 1
        with open(self.refused_path, "ab", opener=_private) as file:
            file.write(record._replace(row=None).line(seal))

    @property
    def refused_path(self) -> Path:
        """Path of the file `<logger>.refused.jsonl`, which holds the refused records."""
        return self.path.with_suffix(".refused.jsonl")

    def close(self) -> None:
        """Close the file, and delete it if no record waits. From then on, `append` writes to a file immediately."""
        with self._lock, suppress(OSError):
            self._is_closed = True
            if self._file is not None:
                if not self._in_file and self._is_ours(self._file):
                    self.path.unlink(missing_ok=True)
                    if self.note is not None:
                        self.note.unlink(missing_ok=True)
                        self.path.parent.rmdir()  # rmdir fails if the folder has other files, which must stay
                # Closing the file does not unlock it if a forked process still has it open.
                _lock_file(self._file.fileno(), False)
                self._file.close()
                self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.announce()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._file = os.fdopen(descriptor, "r+b")
            _lock_file(descriptor, True)
            self._offset = self._end = self._file.seek(0, os.SEEK_END)  # keep an earlier process's lines
        return self._file

    def _is_ours(self, file: BinaryIO) -> bool:
        """Return False if somebody else has written to the file, such as the thread of an earlier logger that hangs."""
        return os.fstat(file.fileno()).st_size == self._end

    def _numbered(self, record: Record) -> Record:
        """Return the record with the index of the row that it will become in the logger's output file."""
        if self._next_row is None or not record.rows:
            return record if record.row is None else record._replace(row=None)
        self._next_row += 1
        return Record(*record[:4], self._next_row - 1)

    def _spill(self, sync: bool) -> None:
        before = self._next_row
        if not self._in_file:
            self._next_row = self.place
        data = memoryview(b"".join(self._numbered(record).line(self.seal) for record in self._memory))
        try:
            file = self._opened() if data else self._file
            if file is None:
                return
            # Write to the descriptor: after an error on a full disk, `file` would keep the bytes and write them again.
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
            self._next_row = before
            self._next_spill_s = time.monotonic() + _DISK_PAUSE_S
            self._make_room(error)
            return
        self._end += len(data)
        self._in_file += len(self._memory)
        self._memory.clear()
        self._bytes = 0

    def _make_room(self, error: OSError) -> None:
        """Drop the oldest records in memory if the disk does not accept them and the memory limit is reached."""
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
            except ValueError:
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
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _lock_file(descriptor: int, locked: bool) -> None:
    """Lock or unlock the file. The lock tells `instep runs sync` that a logger uses the file; if it fails, go on."""
    with suppress(ImportError, OSError):  # there are no locks on Windows and some file systems
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if locked else fcntl.LOCK_UN)


def read_note(path: Path) -> dict[str, Any]:
    """Read the note, a JSON file beside a logger's backlog that describes the logger; {} if it cannot be read."""
    with suppress(OSError, ValueError):
        return parse_object(read_regular(path, INDEX_BYTES))
    return {}
