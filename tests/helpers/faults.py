"""Faults at chosen operations of a store, by one small object.

A `FaultPlan` is a trace for `LocalFiles`: it remembers every operation, and kills the process, fails or waits where it
was told to. `everywhere()` puts it under all stores of the process, such as those that a Trainer makes.

Example, in a child process:

    store = CheckpointStore(folder, LocalFiles(FaultPlan().kill_at("rename")))
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from instep.checkpoint import LocalFiles

At: TypeAlias = "int | str"
HOLD_S = 60.0


class FaultPlan:
    """What to do at which operation of a store. `at` is an operation's number from 0, or its name: the first of it.

    Attributes:
        log: every operation so far: its name, path and detail, as `LocalFiles.trace` has them; and the marks.
        held: set while an operation waits at `hold_at`.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, Path, Any]] = []
        self.held = threading.Event()
        self._released = threading.Event()
        self._faults: list[tuple[At, Callable[[], Any]]] = []
        self._seen: dict[str, int] = {}

    @property
    def operations(self) -> list[tuple[str, Path]]:
        """Name and path of every operation so far."""
        return [(name, path) for name, path, _ in self.log if name != "mark"]

    def kill_at(self, at: At) -> FaultPlan:
        """SIGKILL to this process, before the operation happens."""
        return self._do(at, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def fail_at(self, at: At, code: int = errno.ENOSPC) -> FaultPlan:
        """The operation raises OSError with this number instead of happening."""

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        return self._do(at, fail)

    def hold_at(self, at: At) -> FaultPlan:
        """The operation waits for `release`; `held` tells that it got there."""

        def hold() -> None:
            self.held.set()
            assert self._released.wait(HOLD_S), f"held at {at!r} for more than {HOLD_S} s"

        return self._do(at, hold)

    def release(self) -> None:
        """Let the operation that is held go on."""
        self._released.set()

    def mark(self, text: str) -> None:
        """Note in the log that something else happened here."""
        self.log.append(("mark", Path(text), None))

    def _do(self, at: At, act: Callable[[], Any]) -> FaultPlan:
        self._faults.append((at, act))
        return self

    def __call__(self, operation: str, path: Path, detail: Any = None) -> None:
        number, first = sum(self._seen.values()), operation not in self._seen
        self._seen[operation] = self._seen.get(operation, 0) + 1
        self.log.append((operation, path, bytes(detail) if isinstance(detail, memoryview) else detail))
        for at, act in self._faults:
            if at == number or (at == operation and first):
                act()

    @contextmanager
    def everywhere(self) -> Iterator[FaultPlan]:
        """Under every store of this process that has no trace of its own."""
        before = LocalFiles.__init__

        def init(files: LocalFiles, trace: Any = None, *args: Any, **kwargs: Any) -> None:
            before(files, self if trace is None else trace, *args, **kwargs)

        with mock.patch.object(LocalFiles, "__init__", init):
            yield self


def exit_status_of(child: Callable[[], Any]) -> int:
    """Run a function in a forked child; its end as `os.waitstatus_to_exitcode` has it: negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        except BaseException:
            import traceback  # late: only a failing child needs it

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
