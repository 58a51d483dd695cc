"""`Sender`: the thread of a logger, which opens the tracker, sends the waiting records in order, and closes it.

If the tracker does not accept a record, the record stays in the backlog and is sent again later, while training
continues. A call of the tracker that never returns blocks only this thread, since other threads wait for it with a
time limit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future

# Before Python 3.11, the TimeoutError of concurrent.futures is not the builtin class.
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import InstepError
from instep.loggers.backlog import BATCH, Backlog, Record
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.loggers.delivery import Delivery

_PERIOD_S = 0.5  # seconds that a record waits for further records to be sent together
_LONGEST_PAUSE_S = 60.0
_MOST_TEXT = 200
_TRIES = 3  # attempts to send a record before the next one is tried in its place

_HELD_UP: dict[Path, threading.Thread] = {}
"""Threads, by backlog, that a call of a tracker still blocks after the logger was closed. The next thread of the same
backlog waits for such a thread, because both would send the record of the blocked call."""


def in_short(error: Exception | None) -> str:
    """Format an error in one short line, since the errors of some trackers contain long chains of causes."""
    text = clean(" ".join(str(error).split()).rstrip("."))
    return f"{type(error).__name__}: {text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + ' ...'}"


class Sender:
    """Thread that opens a tracker, sends it the records of a backlog, and closes it.

    After a failure the thread warns, and sends the record again after a pause, which doubles up to a minute. A record
    that fails several times while the next one succeeds is moved to the file `<logger>.refused.jsonl`.

    Args:
        books: the logger's `Delivery`, whose methods open the tracker and write to it.
        name: name of the logger, for messages.
        backlog: queue of the waiting records.
    """

    def __init__(self, books: Delivery, name: str, backlog: Backlog) -> None:
        self.backlog = backlog
        self.error: Exception | None = None
        """Error of the last attempt to send; None while sending works."""
        self.is_begun = False
        self._is_started = False  # whether the tracker is open and must be closed at the end
        self._left_over = 0  # number of records at the front of the queue that an earlier process left
        self._books, self._name = books, name
        self._failures = 0
        self._singly = 0  # number of records to send one by one, after a failure to send them together
        self._next_try_s = 0.0
        self._hurries = False  # True if records must be sent now, without waiting for more
        self._tasks: deque[tuple[Callable[[], Any], Future[Any], bool]] = deque()
        self._wake = backlog.is_many
        self._ends = False
        self._noted_s = time.monotonic()
        self._before = _HELD_UP.get(backlog.path)
        self._begun: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, name=f"instep-{name}", daemon=True)
        self.thread.start()

    # ---- methods for any thread

    def begin(self, timeout_s: float) -> None:
        """Wait until the tracker is open. If that fails or takes too long, return; the thread tries again later.

        Raises:
            InstepError: the logger's settings are wrong.
        """
        try:
            error = self._begun.exception(timeout_s)
        except NotInTime:
            warn_user(f"{self._name} has not begun after {timeout_s:g} s. Training goes on, and what it logs is kept")
            return
        except BaseException:  # for example a KeyboardInterrupt during the wait
            self._end()
            raise
        if isinstance(error, InstepError):
            self._end()
            raise error

    def _end(self) -> None:
        self._ends = True
        self._wake.set()

    def ask(self, function: Callable[[], Any], timeout_s: float, after_all: bool = False, early: bool = True) -> Any:
        """Run a function in this thread, wait for it, and return its result.

        Args:
            function: function without arguments.
            timeout_s: longest time to wait, in seconds.
            after_all: whether to run it only after an attempt to send all records that wait now.
            early: with `after_all`, whether to send also the records that would otherwise wait to fill a batch.

        Raises:
            TimeoutError: the function did not end within `timeout_s`.
        """
        if threading.current_thread() is self.thread:
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
        """Send the records that are due; records that could not be sent are written to the disk.

        Args:
            timeout_s: longest time to wait, in seconds.
            early: whether to send also the records that would otherwise wait to fill a batch.

        Returns:
            True if all records that were due have been sent.
        """
        with suppress(TimeoutError):
            self.ask(lambda: None, timeout_s, after_all=True, early=early)
        left = len(self.backlog) > 0 and (early or self._is_due())
        if left:
            self.backlog.spill()
            self._books.write_note()
        return not left

    def close(self, finalize: Callable[[], None], timeout_s: float) -> None:
        """Send all waiting records, close the tracker and end the thread; warn about records that could not be sent.

        Args:
            finalize: function that closes the tracker.
            timeout_s: longest time for all of this, in seconds.
        """
        end_s = time.monotonic() + timeout_s

        def last() -> None:
            self._ends = True  # from here on, no record is sent to the tracker, which is closed below
            if self._is_started:
                finalize()

        self._next_try_s = 0.0  # end the pause after a failure, to try once more
        self.flush(timeout_s, early=True)
        try:
            self.ask(last, max(0.1, end_s - time.monotonic()))
        except TimeoutError:
            warn_user(f"{self._name} did not close within {timeout_s:g} s")
        except Exception as error:  # noqa: BLE001  a tracker never ends a run
            warn_user(f"{self._name} could not be closed: {in_short(error)}")
        self._end()
        self.thread.join(max(0.1, end_s - time.monotonic()))
        if self.thread.is_alive():
            self._books.writer.file.stop()  # prevent late writes, since the warning below counts unsent records
        self.backlog.spill()
        self._warn_of_rest()
        if self.thread.is_alive():
            _HELD_UP[self.backlog.path] = self.thread
        else:
            self.backlog.close()

    def _warn_of_rest(self) -> None:
        left, path = len(self.backlog), self.backlog.path
        reason = f": {in_short(self.error)}" if self.error is not None else ""
        if left:
            self._books.write_note()
            warn_user(
                f"{self._name} did not take {left} records{reason}. They are kept in {path}; send them by: "
                f"instep runs sync {path.parent.parent}"
            )
        if self.backlog.refused:
            warn_user(f"{self._name} refused {self.backlog.refused} records; they are in {self.backlog.refused_path}")
        if self.backlog.lost:
            warn_user(f"{self._name} lost {self.backlog.lost} records: neither it nor the disk took them")

    # ---- code of the thread

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
        while not self._ends:
            waited = list(self._tasks)  # tasks queued before `_try` sends the records that they wait for
            hurries, self._hurries = self._hurries, False
            if not self._begun.done() or (time.monotonic() >= self._next_try_s and (hurries or self._is_due())):
                self._try()
            self._run_tasks(waited)
            if not self._tasks and not self._ends:
                self._wake.wait(_PERIOD_S)
            self._wake.clear()
        self._run_tasks(())  # this call runs the task that closes the tracker
        while self._tasks:
            self._tasks.popleft()[1].cancel()
        if _HELD_UP.get(self.backlog.path) is self.thread:
            del _HELD_UP[self.backlog.path]
            self.backlog.close()

    def _is_due(self) -> bool:
        few = self.backlog.few()
        return not self.is_begun or (len(self.backlog) > 0 and (few is None or self._books.writer.file.is_due(*few)))

    def _try(self) -> None:
        group: list[Record] = []
        try:
            if not self.is_begun:
                if not self._is_started:
                    self._left_over = self._books.start_writer(self.backlog)
                    self._is_started = True
                self._books.begin(self._left_over)
                self.is_begun = True
                if not self._begun.done():
                    self._begun.set_result(None)
            left = len(self.backlog)
            # Records that are added in the meantime are sent only when they fill a batch, to save requests.
            while (
                not self._ends
                and max(left, len(self.backlog) - BATCH + 1) > 0
                and (group := self.backlog.peek(self._most()))
            ):
                written = self._books.write(group)
                self.backlog.drop(written, self._books.writer.file.row_count())
                left -= written
                self._failures, self._singly = 0, max(0, self._singly - written)
                # Update the logger's note file regularly, even if new records keep coming.
                if time.monotonic() > self._noted_s + _PERIOD_S:
                    self._rest()
                self._run_tasks(())
            self.error = None
            self._rest()
        except BaseException as error:  # noqa: BLE001  a tracker never ends a run, not even by SystemExit
            if self._ends and group:
                return  # `close` has warned about the records that are not sent
            self._singly = self._singly or self._books.in_doubt
            self._note_failure(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            if self._failures >= _TRIES and group and self._next_one_goes():
                self._put_aside(group[0])

    def _rest(self) -> None:
        self._noted_s = time.monotonic()
        self._books.rest()

    def _most(self) -> int:
        return BATCH if self._books.writer.takes_many and not self._singly else 1

    def _note_failure(self, error: Exception) -> None:
        self.error = error
        self._failures += 1
        pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (self._failures - 1))
        self._next_try_s = time.monotonic() + pause_s
        if not self._begun.done():
            self._begun.set_exception(error)
            if isinstance(error, InstepError):
                return
        if self._failures & (self._failures - 1) == 0:  # warn at failure 1, 2, 4, 8 ...
            self._warn(
                f"{self._name} failed: {in_short(error)}. Training goes on; what it was given is kept and sent again "
                f"in {pause_s:g} s"
            )

    def _next_one_goes(self) -> bool:
        try:
            self.backlog.spill(sync=False)  # `peek` cannot return one record from the file and one from memory
            second = self.backlog.peek(2)[1:]
            if second:
                self._books.write(second)
        except BaseException:  # noqa: BLE001  the tracker fails for every record, so the first record is not the reason
            return False
        return bool(second)

    def _put_aside(self, record: Record) -> None:
        names = clean(", ".join(record.names()) or record.hook)
        self._warn(f"{self._name} refuses {names}: {in_short(self.error)}")
        try:
            # Store it without a step: the next record was sent, so the tracker would skip this record's smaller step.
            self.backlog.refuse(record._replace(step=None), self.backlog.seal)
        except OSError:
            self.backlog.lost += 1
        self.backlog.drop(2, self._books.writer.file.row_count())  # the refused record, and the sent one after it
        self._failures, self._next_try_s = 0, 0.0

    def _warn(self, text: str) -> None:
        try:
            warn_user(text)
        except Warning:  # warnings may be errors, but must not end this thread
            print(clean(text), file=sys.stderr)  # noqa: T201

    def _run_tasks(self, waited: Collection[Any]) -> None:
        """Run the functions that `ask` has queued; those with `after_all` only if they are in `waited`."""
        for _ in range(len(self._tasks)):
            function, future, late = task = self._tasks.popleft()
            if late and task not in waited:
                self._tasks.append(task)
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  (`ask` raises it in the thread that waits)
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
