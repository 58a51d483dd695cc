"""Signals: the handler sets a trigger and returns; the loop stops at a step that all ranks agree on."""

from __future__ import annotations

import os
import signal
import threading
from traceback import print_exception
from types import FrameType
from typing import Any

from instep.distributed import Triggers

_NOTICE = b"\nStopping: this step is finished and saved first. Press Ctrl-C again to stop at once.\n"


class SignalGuard:
    """While entered, SIGINT and SIGTERM ask for a resumable stop; a second one stops at once.

    One that nobody acts on any more, because the last agreement is past, is delivered again at the end.

    Does nothing outside the main thread, where Python delivers no signals. Processes forked from this one, such as a
    loader's workers, inherit the handler: in them Ctrl-C does nothing, since this process ends them, and SIGTERM ends.

    Args:
        triggers: where `preempted` is set.
        quiet: say nothing to the user; for all ranks but one.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, triggers: Triggers, quiet: bool = False) -> None:
        self._triggers = triggers
        self._quiet = quiet
        self._before: dict[int, Any] = {}
        self._pid = -1
        self.received: int | None = None

    def __enter__(self) -> SignalGuard:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._put_back()
        number, self.received = self.received, None
        if number is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        if error is not None:
            print_exception(error)  # the signal may end the process before anybody sees it
        signal.raise_signal(number)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None: it was installed by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if self.received is not None:
            self._put_back()
            self.received = None  # it is delivered now
            signal.raise_signal(number)
            return
        self.received = number
        if number == signal.SIGINT and not self._quiet:
            os.write(2, _NOTICE)  # print is not safe in a handler
        self._triggers.set("preempted", signal.Signals(number).name)
