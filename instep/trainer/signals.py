"""Signals: the handler sets a trigger and returns; the loop stops at a step that all ranks agree on."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from instep.distributed import Triggers

_NOTICE = b"\nStopping: this step is finished and saved first. Press Ctrl-C again to stop at once.\n"


class SignalGuard:
    """While entered, SIGINT and SIGTERM ask for a resumable stop; a second one stops at once.

    Does nothing outside the main thread, where Python delivers no signals.

    Args:
        triggers: where `preempted` is set.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers
        self._before: dict[int, Any] = {}
        self.received: int | None = None

    def __enter__(self) -> SignalGuard:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: it was installed by C code, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self.__exit__()
            signal.raise_signal(number)
            return
        self.received = number
        if number == signal.SIGINT:
            os.write(2, _NOTICE)  # print is not safe in a handler
        self._triggers.set("preempted", signal.Signals(number).name)
