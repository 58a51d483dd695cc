"""Run a function in ranks that are forked from the agent's process, so that a notebook's cell may define the function.

A forked process does not have OpenMP's threads, so a rank uses one thread; with more threads it would hang. A forked
process cannot use a device that its parent uses, so the parent must have used neither the process group nor the GPU. A
lock that another thread of the parent holds during the fork stays locked forever in the forked process. One such lock
is that of glibc's resolver: while a rank connects to the agent's store, a thread of the store holds it. So no rank
connects before all ranks are forked.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from instep.errors import DistributedError
from instep.health.error_report import FailureReport, write_report

_READ_S = 5.0  # seconds to read a result after its rank has ended; enough for the data that a pipe holds


class Failure(NamedTuple):
    """The rank that failed, how it ended, and its report, which is None if the rank wrote none."""

    rank: int
    how: str
    report: FailureReport | None


@dataclass
class Forked:
    """A function for forked ranks, and the results that the ranks returned.

    Args:
        function: function that each rank calls.
        args: arguments of the function.
        failure: the failure of the job, which the agent sets if it does not restart the ranks.
        interrupted: whether the agent got SIGINT; the agent sets it.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    failure: Failure | None = None
    interrupted: bool = False
    _pipes: list[tuple[Any, Any]] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)
    _results: dict[int, Any] = field(default_factory=dict)
    _problems: dict[int, Exception] = field(default_factory=dict)

    @contextmanager
    def starting(self, count: int) -> Iterator[None]:
        """Make pipes for ranks that the `with` block forks. After the block, let the ranks run, and read their results.

        A forked rank waits for data in its pipe before it calls the function.
        """
        self._pipes, self._results, self._problems = [Pipe() for _ in range(count)], {}, {}
        try:
            yield
        except BaseException:
            for here, _ in self._pipes:
                here.close()  # a rank that waits for data ends when its pipe is closed
            raise
        self._readers = []
        for local_rank, (here, there) in enumerate(self._pipes):
            there.close()
            with suppress(OSError):  # the process was already killed
                here.send_bytes(b"go")
            args = here, local_rank, self._results, self._problems
            reader = threading.Thread(target=self._read, args=args, name="instep-result", daemon=True)
            reader.start()
            self._readers.append(reader)

    @staticmethod
    def _read(here: Any, local_rank: int, results: dict[int, Any], problems: dict[int, Exception]) -> None:
        with here:
            try:
                results[local_rank] = here.recv()
            except Exception as error:  # noqa: BLE001  (the method `results` raises an error about it)
                problems[local_rank] = error

    def run(self) -> None:
        """Run in a rank: call the function, send its result, and end this process."""
        # Imported late, so that this module loads quickly. The process that forked this one has loaded torch already.
        import torch

        parent = os.getppid()
        # A session of its own: Ctrl-C in a terminal then reaches only the agent, which passes it on, and the agent can
        # kill the rank with all its processes.
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # the system kills this process when the agent ends
            if os.getppid() != parent:
                os._exit(1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        torch.set_num_threads(1)
        _, pipe = self._pipes[int(os.environ["LOCAL_RANK"])]
        for end in chain(*self._pipes):
            if end is not pipe:
                end.close()  # a copy left open here would keep the pipe of another rank open after that rank has ended
        try:
            pipe.recv_bytes()
            # Sent as bytes, since `send` would put tensors into shared memory, which ends with this process.
            pipe.send_bytes(pickle.dumps(self._call()))
        except Exception as error:  # noqa: BLE001 (the launcher raises it)
            if not write_report(os.environ["TORCHELASTIC_ERROR_FILE"], error):
                traceback.print_exc()
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)  # if it were raised, torch would take the process for successful
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # after a return, torch would keep the process until its parent has read the result

    def _call(self) -> Any:
        try:
            return self.function(*self.args)
        except SystemExit as end:
            if end.code:
                raise
            return None

    def results(self) -> list[Any]:
        """Return the results of this machine's ranks, after all ranks have ended without an error.

        Raises:
            DistributedError: the function ended a rank's process and did not return, or returned an object that this
                process cannot read.
        """
        for reader in self._readers:
            reader.join(_READ_S)
        return [self._result(local_rank) for local_rank in range(len(self._pipes))]

    def _result(self, local_rank: int) -> Any:
        if local_rank in self._results:
            return self._results[local_rank]
        error = self._problems.get(local_rank, EOFError())
        if isinstance(error, EOFError):
            raise DistributedError(f"the function did not return on local rank {local_rank}: it ended its process")
        raise DistributedError(
            f"what the function returned on local rank {local_rank} cannot be read by the launcher: "
            f"{type(error).__name__}: {error}"
        ) from error


class ForkedRank:
    """A forked rank with the methods of `subprocess.Popen` that the agent needs."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.pid: int | None = process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the rank, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the rank runs."""
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        """Send the process a signal, if it still runs."""
        if self.poll() is None:
            assert self.pid is not None
            os.kill(self.pid, signum)

    def wait(self) -> None:
        """Wait until the rank has ended."""
        self._process.join()
