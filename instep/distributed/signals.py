"""Signals such as SIGTERM: the handler sets a trigger, and the loop stops at a step that all ranks agree on.

Python runs signal handlers between two bytecodes of the main thread. So no handler runs while the main thread waits in
a collective that another rank does not join. But the interpreter's own handler, in C, also writes the signal's number
to the "wake-up" descriptor at once. A daemon thread reads from the pipe of this descriptor, at no cost to a step. It
ends the process when the grace period, which starts with the first signal, is over. Code that never releases the GIL
can only be killed.
"""

from __future__ import annotations

import _thread
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from traceback import format_exception
from types import FrameType
from typing import Any

from instep.distributed import Triggers
from instep.errors import EXIT_FAILED
from instep.utils.untrusted_files import clean

SAME_S = 1.0  # seconds within which the same signal is a duplicate, since launcher and scheduler may both forward it
AT_ONCE_S = 5.0  # seconds after a second signal in which the main thread may end by itself
_open = 0


class Deadline:
    """Thread that ends the process `grace_s` seconds after the first signal, or soon after a second one.

    Args:
        numbers: numbers of the signals that start the grace period.
        grace_s: seconds of the grace period; infinity for no limit.
        overdue: function that is called with the signal's name, in the thread, before the process is ended. It returns
            the exit code.
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
        if not self._wakes:  # an event loop already uses the wake-up descriptor, so only the handler reports signals
            signal.set_wakeup_fd(before)
        self._thread = threading.Thread(target=self._watch, name="instep-grace", daemon=True)
        self._thread.start()

    def note(self, number: int) -> None:
        """Report a signal to the thread, unless the wake-up descriptor does so. The signal's handler calls this."""
        if not self._wakes:
            os.write(self._sender, bytes([number]))

    def close(self) -> None:
        """End the thread, so that it cannot end the process later. A second call does nothing."""
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
        # A last deadline, in case the next lines hang too, on a disk or on a pipe for stderr that nobody reads.
        faulthandler.dump_traceback_later(AT_ONCE_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        sys.stderr.flush()
        text = f"instep: {name} came {after_s:.1f} s ago and this process (pid {os.getpid()}) still runs, so it is "
        os.write(2, f"{text}ended. It was here:\n".encode())
        faulthandler.dump_traceback(2, all_threads=True)
        os._exit(self._overdue(name))


@functools.cache
def _close_in_children() -> None:
    """Make forked child processes drop the wake-up pipe, so that their signals are not written into it."""

    def forget() -> None:
        if _open and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)


class SignalGuard:
    """Context manager in which SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 request a resumable stop.

    A second signal stops at once. Signals that the program ignores stay ignored, and the program's own handlers of
    SIGUSR1 and SIGUSR2 stay. Repeats of a signal within a second are ignored, since batch systems send it to the
    launcher and to the ranks, and the launcher also forwards it to its ranks.

    A signal that came after the last agreement of the ranks is raised again at the end of the block. SIGUSR1 and
    SIGUSR2 are not raised again, since they would kill a program whose training is done.

    This object does nothing outside the main thread, since Python delivers signals only to the main thread. Processes
    forked from this one, such as a loader's workers, inherit the handler: there SIGTERM ends the process, and the other
    signals do nothing, since this process ends its children.

    Args:
        triggers: triggers, among which "preempted" is set at a signal.
        grace_s: seconds from the first signal until the process is ended, whatever it is doing; infinity for never.
        overdue: function that is called with the signal's name, in another thread, before the process is ended. It
            returns the exit code.
        quiet: True: print no message at a signal. Only one rank prints.
        killed: function that is called in the handler with the name of a second signal, if this signal ends the process
            without an exception.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    USERS_OWN = (signal.SIGUSR1, signal.SIGUSR2)

    def __init__(
        self,
        triggers: Triggers,
        grace_s: float = float("inf"),
        overdue: Callable[[str], int] = lambda name: EXIT_FAILED,
        quiet: bool = False,
        killed: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._triggers = triggers
        self._overdue = overdue
        self._grace_s = grace_s
        self._quiet = quiet
        self._killed = killed
        self._before: dict[int, Any] = {}
        self._pid = -1
        self._deadline: Deadline | None = None
        self.received: int | None = None
        self.got_sigterm = False

    def __enter__(self) -> SignalGuard:
        self._pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (*self.SIGNALS, *self.USERS_OWN):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or (number in self.USERS_OWN and before is not signal.SIG_DFL):
                continue
            self._before[number] = before
        self._deadline = Deadline(self._before, self._grace_s, self._overdue)
        for number in self._before:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._put_back()
        if self._deadline is not None:
            self._deadline.close()
        number, self.received = self.received, None
        if number is None or number in self.USERS_OWN or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        if error is not None:
            with suppress(OSError, ValueError):  # stderr may be closed or on a full disk
                # Write the error now, since the signal may end the process before the error is shown.
                sys.stderr.write(clean("".join(format_exception(error))))
        signal.raise_signal(number)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None means that C code had installed the handler, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        assert self._deadline is not None
        self._deadline.note(number)
        if self.received is None:
            self.received, self._at = number, time.monotonic()
            self.got_sigterm = number == signal.SIGTERM
            if not self._quiet:
                _tell(_notice(number, self._grace_s))
            self._triggers.set("preempted", signal.Signals(number).name)
        elif number != self.received or time.monotonic() - self._at >= SAME_S:
            if self._before.get(number) is signal.SIG_DFL:
                self._killed(signal.Signals(number).name)
            self._put_back()
            self.received = None  # `__exit__` must not raise the signal again, since the next line raises it
            signal.raise_signal(number)


def _tell(text: str) -> None:
    """Write to stderr from a signal handler, where print is not safe.

    A progress bar would overwrite the text. So if there is a progress bar, a thread prints the text to the bar's
    replacement of stderr, which shows it above the bar.
    """
    if hasattr(sys.stderr, "rich_proxied_file"):
        # Do not use `threading`, which may have been in the middle of starting a thread when the signal came.
        _thread.start_new_thread(_print, (text,))
    else:
        os.write(2, f"\n{text}\n".encode())


def _print(text: str) -> None:
    with suppress(Exception):  # the bar or the terminal may be gone; the message is repeated at the end of the run
        sys.stderr.write(clean(f"{text}\n"))
        sys.stderr.flush()


def _notice(number: int, grace_s: float) -> str:
    within = "" if grace_s == float("inf") else f", within {grace_s:g} s"
    again = "Press Ctrl-C again to stop" if number == signal.SIGINT else "A second one stops it"
    return f"Stopping ({signal.Signals(number).name}): this step is finished and saved first{within}. {again} at once."
