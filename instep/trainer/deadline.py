"""The end of the grace period: a process that was asked to stop ends in time, wherever its main thread is.

Python runs signal handlers between two steps of the main thread's bytecode: never, while that sits in a collective that
another rank does not come to. But the interpreter's own handler, in C, also writes the signal's number to the "wake-up"
descriptor at once. A daemon thread sleeps on the other end of that pipe: it costs a step nothing, and keeps the time
from the first signal on. It needs the GIL when the time is over; code that never gives it back can only be killed.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection

SAME_S = 1.0  # the same signal again within this time is the same one
AT_ONCE_S = 5.0  # what is left after a second signal, for the main thread to end by itself
_open = 0


class Deadline:
    """Ends the process `grace_s` after the first of some signals, or soon after a second one.

    Args:
        numbers: the signals.
        grace_s: seconds; infinity for no end.
        overdue: called with the signal's name before the process ends, in the thread; returns the exit code.
    """

    def __init__(self, numbers: Collection[int], grace_s: float, overdue: Callable[[str], int]) -> None:
        global _open
        self._numbers = frozenset(numbers)
        self._grace_s = grace_s
        self._overdue = overdue
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        _close_in_children()
        _open += 1
        before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        self._wakes = before == -1
        if not self._wakes:  # an event loop's, which needs it: then only the handler tells us
            signal.set_wakeup_fd(before)
        self._thread = threading.Thread(target=self._watch, name="instep-grace", daemon=True)
        self._thread.start()

    def note(self, number: int) -> None:
        """A signal came; called by its handler."""
        if not self._wakes:
            os.write(self._sender, bytes([number]))

    def close(self) -> None:
        """The process is not asked to stop any more, or has stopped."""
        global _open
        if self._receiver < 0:
            return
        _open -= 1
        if self._wakes:
            signal.set_wakeup_fd(-1)
        os.write(self._sender, b"\0")
        self._thread.join()
        os.close(self._sender)
        os.close(self._receiver)
        self._receiver = -1

    def _watch(self) -> None:
        ready = select.poll()
        ready.register(self._receiver, select.POLLIN)
        first, since, end = 0, 0.0, float("inf")
        while True:
            left_s = end - time.monotonic()
            if not ready.poll(None if end == float("inf") else max(0.0, 1000 * left_s)):
                break
            for number in os.read(self._receiver, 512):
                now = time.monotonic()
                if number == 0:
                    return
                if number not in self._numbers:
                    continue
                if not first:
                    first, since, end = number, now, now + self._grace_s
                elif number != first or now - since >= SAME_S:
                    end = min(end, now + AT_ONCE_S)
        self._end(signal.Signals(first).name, time.monotonic() - since)

    def _end(self, name: str, after_s: float) -> None:
        # If what follows hangs in turn: a disk, or a pipe for stderr that nobody reads.
        faulthandler.dump_traceback_later(AT_ONCE_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        sys.stderr.flush()
        text = f"instep: {name} came {after_s:.1f} s ago and this process (pid {os.getpid()}) still runs, so it is "
        os.write(2, f"{text}ended. It was here:\n".encode())
        faulthandler.dump_traceback(2, all_threads=True)
        os._exit(self._overdue(name))


@functools.cache
def _close_in_children() -> None:
    """A forked child's signals must not be written into this process's pipe."""

    def forget() -> None:
        if _open and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)
