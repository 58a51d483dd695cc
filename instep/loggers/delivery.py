"""Delivery of what is logged to a tracker: a thread sends the records that wait in a backlog, in their order.

A record that the tracker refuses or cannot take now stays in the backlog and is sent again later. Training goes on
meanwhile. A call of the tracker that never returns blocks that thread alone: whoever waits for it has a time limit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotInTime  # before Python 3.11 another class than TimeoutError
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from instep.errors import InstepError
from instep.loggers.backlog import BATCH, Backlog, Record, Row, RowKey, read_note, written_name
from instep.loggers.trust import seal_of, sent_in, signed, version_in, why_not
from instep.utils.atomic import replace
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.loggers.base import Logger

_PERIOD_S = 0.5  # how long records wait for company
_LONGEST_PAUSE_S = 60.0
_MOST_TEXT = 200
_TRIES = 3  # of one record, until the next one shows whether the tracker works
_MISTAKES = (TypeError, ValueError, AttributeError, NameError, ImportError)  # of settings, not failures of a network

_HELD_UP: dict[Path, threading.Thread] = {}
"""Threads that a call of a tracker blocks after the logger was closed, by backlog. The next thread of the same backlog
waits for them: both would send the record that the call is about."""


_OPEN: WeakValueDictionary[int, Logger] = WeakValueDictionary()


def close_in_forks(logger: Logger) -> None:
    """Have forked processes see this logger closed: they have no thread, and what waits is the parent's to send."""
    _OPEN[id(logger)] = logger


def _forget() -> None:
    for logger in _OPEN.values():
        logger._open, logger._delivery, logger._is_main = False, None, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # once: a handler cannot be taken back


def in_short(error: Exception | None) -> str:
    """Write an error on one line: clients put whole chains of causes into theirs."""
    text = clean(" ".join(str(error).split()).rstrip("."))
    return f"{type(error).__name__}: {text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + ' ...'}"


class Tracker(Protocol):
    """What a `Delivery` sends to; every method runs in its thread."""

    takes_many: bool
    """Whether several rows of metrics may be sent at once, all or none of them."""
    is_started: bool
    """Whether it has to be closed, also where `begin` failed after that."""

    def begin(self) -> None:
        """Open it."""
        ...

    def send(self, records: list[Record]) -> None:
        """Write one record, or several rows of metrics."""
        ...

    def is_due(self, first: Record, last: Record) -> bool:
        """Return True if the few records from the first to the last should not wait for more."""
        ...

    def place(self) -> int | None:
        """Return the number of rows in the tracker's file; None where it does not count them."""
        ...

    def stop(self) -> None:
        """Write nothing more from now on. Called from another thread, where a call of this one does not end."""
        ...

    def rest(self) -> None:
        """Called when nothing waits, and now and then in between."""
        ...

    def write_note(self) -> None:
        """Write a file beside the backlog: which logger this is, and the last step that was sent of each metric."""
        ...


class Delivery:
    """Thread that brings a backlog to a tracker, and opens and closes the tracker too.

    Each failure is a warning, and the record is sent again after a pause, which doubles up to a minute. A record that
    fails several times while the next one succeeds is moved into the file `<logger>.refused.jsonl`.

    Args:
        tracker: the logger's side.
        name: of the logger, for texts.
        backlog: what waits.
    """

    def __init__(self, tracker: Tracker, name: str, backlog: Backlog) -> None:
        self.backlog = backlog
        self.error: Exception | None = None
        """Why nothing could be sent last; None while it works."""
        self.is_begun = False
        self._tracker, self._name = tracker, name
        self._failures = 0
        self._singly = 0  # records that are sent one by one, since one of them was refused
        self._next_try_s = 0.0
        self._hurries = False  # to send what else would wait for more
        self._tasks: deque[tuple[Callable[[], Any], Future[Any], bool]] = deque()
        self._wake = threading.Event()
        self._ends = False
        self._noted_s = time.monotonic()
        self._before = _HELD_UP.get(backlog.path)
        self._begun: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"instep-{name}", daemon=True)
        self._thread.start()

    # ---- from any thread

    def begin(self, timeout_s: float) -> None:
        """Wait until the tracker is open; where that fails or takes too long, the thread goes on trying.

        Raises:
            InstepError: the logger's settings are wrong.
        """
        try:
            error = self._begun.exception(timeout_s)
        except NotInTime:
            warn_user(f"{self._name} has not begun after {timeout_s:g} s. Training goes on, and what it logs is kept")
            return
        except BaseException:  # Ctrl-C
            self._end()
            raise
        if isinstance(error, InstepError):
            self._end()
            raise error

    def _end(self) -> None:
        self._ends = True
        self._wake.set()

    def put(self, hook: str, args: tuple[Any, ...], step: int | None, time_s: float) -> Record:
        """Send one call of a hook when its turn comes."""
        record = Record(hook, args, step, time_s)
        if self.backlog.append(record):
            self._wake.set()
        return record

    def ask(self, function: Callable[[], Any], timeout_s: float, after_all: bool = False, early: bool = True) -> Any:
        """Run a function in the thread and return its result.

        Args:
            function: what to run.
            timeout_s: how long to wait.
            after_all: run it once all that waits now has been sent, or cannot be.
            early: send what would wait for more, too.

        Raises:
            TimeoutError: it did not come to its end in time.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: Future[Any] = Future()
        self._hurries |= after_all and early
        self._tasks.append((function, future, after_all))
        self._wake.set()
        try:
            future.exception(timeout_s)
        except (NotInTime, CancelledError):
            raise TimeoutError(f"{self._name} did not answer within {timeout_s:g} s") from None
        return future.result()

    def flush(self, timeout_s: float, early: bool = False) -> bool:
        """Send what is due; what does not arrive in time is brought to the disk. Returns whether all arrived.

        Args:
            timeout_s: how long to wait.
            early: send what would wait for more, too.
        """
        with suppress(TimeoutError):
            self.ask(lambda: None, timeout_s, after_all=True, early=early)
        left = len(self.backlog) > 0 and (early or self._is_due())
        if left:
            self.backlog.spill()
            self._tracker.write_note()
        return not left

    def close(self, finalize: Callable[[], None], timeout_s: float) -> None:
        """Send all that waits, close the tracker and end the thread; say what did not arrive.

        Args:
            finalize: closes the tracker.
            timeout_s: how long all of that may last.
        """
        end_s = time.monotonic() + timeout_s

        def last() -> None:
            self._ends = True  # first: nothing is sent to a closed tracker
            if self._tracker.is_started:
                finalize()

        self._next_try_s = 0.0  # one more try, whatever the pause
        self.flush(timeout_s, early=True)
        try:
            self.ask(last, max(0.1, end_s - time.monotonic()))
        except TimeoutError:
            warn_user(f"{self._name} did not close within {timeout_s:g} s")
        except Exception as error:  # noqa: BLE001  a tracker never ends a run
            warn_user(f"{self._name} could not be closed: {in_short(error)}")
        self._end()
        self._thread.join(max(0.1, end_s - time.monotonic()))
        if self._thread.is_alive():
            self._tracker.stop()  # so that the number that is said stays true
        self.backlog.spill()
        self._say_left()
        if self._thread.is_alive():
            _HELD_UP[self.backlog.path] = self._thread
        else:
            self.backlog.close()

    def _say_left(self) -> None:
        left, path = len(self.backlog), self.backlog.path
        reason = f": {in_short(self.error)}" if self.error is not None else ""
        if left:
            self._tracker.write_note()
            warn_user(
                f"{self._name} did not take {left} records{reason}. They are kept in {path}; send them by: "
                f"instep runs sync {path.parent.parent}"
            )
        if self.backlog.refused:
            warn_user(f"{self._name} refused {self.backlog.refused} records; they are in {self.backlog.refused_path}")
        if self.backlog.lost:
            warn_user(f"{self._name} lost {self.backlog.lost} records: neither it nor the disk took them")

    # ---- in the thread

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
        while not self._ends:
            waited = list(self._tasks)  # what is asked for from here on comes after what is put from here on
            hurries, self._hurries = self._hurries, False
            if not self._begun.done() or (time.monotonic() >= self._next_try_s and (hurries or self._is_due())):
                self._try()
            self._run_tasks(waited)
            if not self._tasks and not self._ends:
                self._wake.wait(_PERIOD_S)
            self._wake.clear()
        self._run_tasks(())  # such as the tracker's end
        while self._tasks:
            self._tasks.popleft()[1].cancel()
        if _HELD_UP.get(self.backlog.path) is self._thread:
            del _HELD_UP[self.backlog.path]
            self.backlog.close()

    def _is_due(self) -> bool:
        few = self.backlog.few()
        return not self.is_begun or (len(self.backlog) > 0 and (few is None or self._tracker.is_due(*few)))

    def _try(self) -> None:
        group: list[Record] = []
        try:
            if not self.is_begun:
                self._tracker.begin()
                self.is_begun = True
                if not self._begun.done():
                    self._begun.set_result(None)
            left = len(self.backlog)
            # What comes meanwhile waits for company: of a row at a time most would be the cost of a request.
            while not self._ends and max(left, len(self.backlog) - BATCH + 1) > 0 and (group := self._next_group()):
                self._tracker.send(group)
                self.backlog.drop(len(group), self._tracker.place())
                left -= len(group)
                self._failures, self._singly = 0, max(0, self._singly - len(group))
                if time.monotonic() > self._noted_s + _PERIOD_S:  # also of a tracker that never catches up
                    self._rest()
                self._run_tasks(())
            self.error = None
            self._rest()
        except BaseException as error:  # noqa: BLE001  a tracker never ends a run, by SystemExit neither
            if self._ends and group:
                return  # it was stopped, and what is left has been said
            self._singly = self._singly or len(group)
            self._note(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            if self._failures >= _TRIES and group and self._next_one_goes():
                self._put_aside(group[0])

    def _rest(self) -> None:
        self._noted_s = time.monotonic()
        self._tracker.rest()

    def _next_group(self) -> list[Record]:
        records = self.backlog.peek(BATCH if self._tracker.takes_many and not self._singly else 1)
        if records and records[0].hook != "_log_metrics":
            return records[:1]
        return list(takewhile(lambda record: record.hook == "_log_metrics", records))

    def _note(self, error: Exception) -> None:
        self.error = error
        self._failures += 1
        pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (self._failures - 1))
        self._next_try_s = time.monotonic() + pause_s
        if not self._begun.done():
            self._begun.set_exception(error)
            if isinstance(error, InstepError):
                return
        if self._failures & (self._failures - 1) == 0:  # 1, 2, 4, 8 ...
            self._say(
                f"{self._name} failed: {in_short(error)}. Training goes on; what it was given is kept and sent again "
                f"in {pause_s:g} s"
            )

    def _next_one_goes(self) -> bool:
        try:
            self.backlog.spill(sync=False)  # both in the file, or both in memory
            second = self.backlog.peek(2)[1:]
            if second:
                self._tracker.send(second)
        except BaseException:  # noqa: BLE001  it is the tracker, not the record
            return False
        return bool(second)

    def _put_aside(self, record: Record) -> None:
        names = clean(", ".join(record.names()) or record.hook)
        self._say(f"{self._name} refuses {names}: {in_short(self.error)}")
        try:
            # Without its step: later ones have arrived, and say nothing of this one.
            self.backlog.refuse(record._replace(step=None), self.backlog.seal)
        except OSError:
            self.backlog.lost += 1
        self.backlog.drop(2, self._tracker.place())  # with the one after it, which has arrived
        self._failures, self._next_try_s = 0, 0.0

    def _say(self, text: str) -> None:
        try:
            warn_user(text)
        except Warning:  # the user made warnings errors, but this thread cannot end the run
            print(clean(text), file=sys.stderr)  # noqa: T201

    def _run_tasks(self, waited: Collection[Any]) -> None:
        """Run what may run at any time, and what has waited for all that was put before it."""
        for _ in range(len(self._tasks)):
            function, future, late = task = self._tasks.popleft()
            if late and task not in waited:
                self._tasks.append(task)
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  raised where it was asked
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


class Marks:
    """How far a tracker got, so that a resumed run sends nothing twice.

    Args:
        at_checkpoint: the last step by name that had been logged when the checkpoint was saved.
        exact: what an earlier process left has been held against what the tracker has, record by record.
    """

    def __init__(self, at_checkpoint: Mapping[str, int] | None = None, exact: bool = False) -> None:
        self.sent: dict[str, int] = {}
        """The last step by name that was sent."""
        self._exact = exact
        self._at_checkpoint = at_checkpoint
        self._has: Mapping[str, int] = {}
        self._rows = Counter[RowKey]()
        self._left_over = 0

    def resume(
        self, sent: Mapping[str, int], has: Mapping[str, int] | None, left_over: int, rows: Iterable[RowKey] = ()
    ) -> None:
        """Take up those of an earlier process.

        Args:
            sent: what it noted.
            has: what the tracker says of its metrics; None: it does not say.
            left_over: records in front that the earlier process could not send.
            rows: those that a file has kept of what came after the checkpoint. Each stands for one record that is
                about to come again. A row counts as a whole: several of one step may have a metric in common.
        """
        self.sent, self._rows = dict(sent), Counter(rows)
        self._has = sent if has is None else {**{name: at for name, at in sent.items() if ":" in name}, **has}
        self._left_over = left_over

    def belongs(self, record: Record) -> bool:
        """Return whether a record came before the checkpoint; what came after it is about to come again."""
        before, step = self._at_checkpoint, record.step
        return before is None or step is None or all(step <= before.get(name, -1) for name in record.names())

    def doubt(self, has: Mapping[str, int], number: int) -> None:
        """Take what the tracker says after a failure: a part of so many records in front may have arrived."""
        self._has, self._left_over = {**self._has, **has}, max(self._left_over, number)

    def missing(self, records: list[Record]) -> list[Record]:
        """Return the parts of the next records that the tracker lacks."""
        if not self._has and not self._rows:
            return records
        parts = [self._missing(record, index < self._left_over) for index, record in enumerate(records)]
        return [part for part in parts if part is not None]

    def _missing(self, record: Record, left_over: bool) -> Record | None:
        step, low = record.step, {} if left_over else self._at_checkpoint
        if step is None or low is None or (left_over and self._exact):
            return record
        names = record.names()
        if self._rows:
            key = RowKey.of_record(record)
            is_kept = self._rows[key] > 0
            self._rows[key] -= is_kept
            return None if is_kept else record
        there = {name for name in names if low.get(name, -1) < step <= self._has.get(name, -1)}
        if not there or record.hook != "_log_metrics":
            return None if there else record
        left = {name: value for name, value in record.args[0].items() if name not in there}
        return record._replace(args=(left, *record.args[1:])) if left else None

    def note(self, records: list[Record]) -> None:
        """Note records as sent."""
        self._left_over = max(0, self._left_over - len(records))
        for record in records:
            if record.step is not None:
                self.sent.update(dict.fromkeys(record.names(), record.step))


class LoggerSide:
    """A logger as the `Tracker` of its delivery: opens it, writes records by its hooks, and notes what was sent."""

    def __init__(self, logger: Logger, backlog: Backlog, marks: Marks) -> None:
        self._logger, self._backlog, self._marks = logger, backlog, marks
        self.is_started = False
        self.note_path = backlog.path.with_suffix(".json")
        self.takes_many = logger._takes_rows
        self._home = Path.cwd()  # where relative paths point from
        self._left_over = 0
        self._has_escaped = False
        backlog.refuses = self._refuses
        backlog.note = self.note_path if logger._LOCAL else None
        backlog.find_seal = lambda: seal_of(self.note_path)
        backlog.announce = self.write_note

    def begin(self) -> None:
        logger = self._logger
        if not self.is_started:
            self._start(logger)
            self.is_started = True
        if logger._resumed:
            sent = {} if logger._LOCAL else sent_in(read_note(self.note_path))
            rows = logger._kept_rows() if logger._x_axis == "step" else ()
            self._marks.resume(sent, self._delivered(), self._left_over, rows)
        logger._resumed = False
        self.rest()

    def _start(self, logger: Logger) -> None:
        if logger._resumed and logger._version is None and not logger._LOCAL:
            logger._version = version_in(read_note(self.note_path))
        try:
            logger._start()
        except Exception as error:
            if logger._LOCAL or isinstance(error, _MISTAKES):
                raise logger._error("start", error) from error
            raise
        self._left_over = self._backlog.take_over(self._keep, logger._row_count())

    def _keep(self, record: Record) -> bool:
        logger = self._logger
        return not (logger._holds(record) or (logger._resumed and not self._marks.belongs(record)))

    def _refuses(self, record: Record) -> bool:
        why = clean(why_not(record, self._backlog.path.parent.parent))
        if why:
            warn_user(f"{type(self._logger).__name__} does not take a record that you did not write: {why}")
        return bool(why)

    def _delivered(self) -> Mapping[str, int] | None:
        return self._logger._delivered() if self._logger._x_axis == "step" else None

    def send(self, records: list[Record]) -> None:
        logger, marks = self._logger, self._marks
        if logger._in_doubt and not logger._LOCAL:
            has = self._delivered()
            if has is not None:
                marks.doubt(has, logger._in_doubt)
        logger._in_doubt = max(logger._in_doubt, len(records))
        left = [self._written(record) for record in marks.missing(records)]
        if left and self.takes_many and left[0].hook == "_log_metrics":
            logger._log_rows([Row(record.args[0], record.args[1], record.time_s) for record in left])
            logger._now_s = left[-1].time_s
        else:
            for record in left:
                logger._now_s = record.time_s
                logger._step = logger._step if record.step is None else record.step
                getattr(logger, record.hook)(*record.args)
        logger._in_doubt = 0
        marks.note(records)

    def _written(self, record: Record) -> Record:
        """Return a record with the names of its metrics as they can be written."""
        names = record.names() if record.hook == "_log_metrics" else []
        changed = {name: written_name(name) for name in names}
        wrong = [name for name, text in changed.items() if name != text]
        if not wrong:
            return record
        if not self._has_escaped:
            self._has_escaped = True
            warn_user(
                f"the name {wrong[0]!r} is no text of UTF-8, or would control a terminal: {type(self._logger).__name__}"
                " writes it as it is here"
            )
        metrics = {changed.get(name, name): value for name, value in record.args[0].items()}
        return record._replace(args=(metrics, *record.args[1:]))

    def is_due(self, first: Record, last: Record) -> bool:
        return self._logger._due(first, last)

    def place(self) -> int | None:
        return self._logger._row_count()

    def stop(self) -> None:
        if self._logger._appended is not None:
            self._logger._appended.stop()

    def rest(self) -> None:
        if not self._logger._LOCAL:
            self.write_note()

    def write_note(self) -> None:
        """Write which logger this is, where it writes, and how far it came, beside the backlog."""
        logger, kind = self._logger, type(self._logger)
        assert logger._log_dir is not None
        run, folder = self._backlog.path.parent.parent, Path(self._home, logger._log_dir)
        arguments = {"name": logger._name, **logger._sync_arguments()}
        arguments["save_dir"] = None if logger._save_dir is None else Path(self._home, logger._save_dir)
        seal = self._backlog.seal
        note = {
            "logger": f"{kind.__module__}:{kind.__qualname__}",
            "arguments": {name: value for name, value in arguments.items() if value is not None},
            "version": logger._version,
            "status": logger.status,
            "sent": dict(self._marks.sent),  # a copy: the other thread may add to it
            "id": seal and seal.about,
            "cwd": self._home,
            # Of a folder in the run folder the part below it: the run folder may be moved.
            "folder": folder.relative_to(run) if folder.is_relative_to(run) else folder,
        }
        note = json.loads(json.dumps(note, default=str))
        try:
            self.note_path.parent.mkdir(parents=True, exist_ok=True)
            replace(self.note_path, json.dumps(note if logger._is_strangers else signed(note)).encode())
        except OSError as error:
            warn_user(f"{self.note_path} could not be written: {error}")
