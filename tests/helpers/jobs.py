"""Jobs of several ranks that are quick to start and can be killed: instep's own agent, with ranks that are forked.

A server process imports what the job needs once. For each job it forks an agent, which runs `instep.launch`'s agent as
in a real start, but forks its ranks instead of starting programs. All processes of a job share a session, so that all
of them are found, data loader workers too. Linux only.

Example:

    with JobServer("tests.checkpoint.victim") as server:
        job = server.start(train, folder, nproc=2, log=folder / "log")
        job.kill("agent")
        job.wait_until_gone(HANG_S)
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


class JobServer:
    """Starts jobs; a context. Leaving it ends its process, and with it every job.

    Args:
        preload: modules that the ranks need.
    """

    def __init__(self, *preload: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(os.environ), sys.path, preload))
        self._process.start()
        theirs.close()
        assert self._connection.recv() == "ready"

    def __enter__(self) -> JobServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)

    def start(self, fn: Callable[..., Any], *args: Any, nproc: int, log: Path, max_restarts: int = 0) -> Job:
        """Run `fn(*args)` as `nproc` ranks.

        Args:
            fn: a function of a module's top level.
            *args: its arguments, pickled.
            nproc: the number of ranks.
            log: what the agent and the ranks write is added to this file.
            max_restarts: how often the ranks are started again.
        """
        self._connection.send(("start", pickle.dumps((fn, args)), nproc, str(log), max_restarts))
        return Job(self, self._connection.recv())

    def _code(self, pid: int) -> int:
        self._connection.send(("code", pid))
        return self._connection.recv()


class Job:
    """A job that runs, or did.

    Args:
        server: who started it.
        pid: the agent's, and the session's number.
    """

    def __init__(self, server: JobServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._fd = os.pidfd_open(pid)  # before it can be reaped: only the server does, when it is asked

    def wait(self, timeout_s: float) -> int | None:
        """The agent's exit code, negative for a signal; None where it still runs after so long."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return None
        code = self._server._code(self.pid)
        os.close(self._fd)
        return code

    def processes(self) -> dict[int, int]:
        """What still runs of the job: process id -> parent's."""
        found: dict[int, int] = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self.pid and fields[0] not in "ZX":
                        found[int(entry.name)] = int(fields[1])
        return found

    def ranks(self) -> list[int]:
        """The process ids of the ranks that run."""
        return sorted(pid for pid, parent in self.processes().items() if parent == self.pid)

    def kill(self, what: str, rng: random.Random | None = None) -> bool:
        """SIGKILL; False where there was nothing to kill.

        Args:
            what: "job": all processes; "agent"; "rank": one of them, which `rng` chooses.
            rng: for "rank".
        """
        if what == "rank":
            ranks = self.ranks()
            victims = [(rng or random).choice(ranks)] if ranks else []
        else:
            victims = [self.pid] if what == "agent" else list(self.processes())
        killed = [pid for pid in victims if _kill(pid)]
        return bool(killed)

    def wait_until_gone(self, timeout_s: float) -> float:
        """Wait for the end of every process of the job, and say how many seconds it took.

        Raises:
            AssertionError: some still run after so long; they are killed.
        """
        started = time.monotonic()
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    fd = os.pidfd_open(pid)
                    ended = select.select([fd], [], [], max(0.0, started + timeout_s - time.monotonic()))[0]
                    os.close(fd)
                    if not ended:
                        survivors = {pid: (parent, _doing(pid)) for pid, parent in self.processes().items()}
                        for survivor in survivors:
                            _kill(survivor)
                        raise AssertionError(f"after {timeout_s} s the job's processes {survivors} still ran")
        return time.monotonic() - started


def _doing(pid: int) -> str:
    """A process's state and what each of its threads waits for."""
    threads = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            threads.append(f"{(thread / 'comm').read_text().strip()}:{state}:{(thread / 'wchan').read_text()}")
    return ", ".join(threads)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# ---- in the server


def _serve(connection: Connection, environment: dict[str, str], path: list[str], preload: tuple[str, ...]) -> None:
    os.environ.clear()  # a fork server's child has the environment of the server's start
    os.environ.update(environment)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    sys.path[:] = path
    for name in ("torch.distributed.elastic.agent.server.local_elastic_agent", "instep.launch.agent", *preload):
        importlib.import_module(name)

    import torch  # in the fork server already

    torch.set_num_threads(1)
    _prctl(36)  # orphans become this process's children: nobody else here may wait for them
    codes: dict[int, int] = {}
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            os._exit(0)
        if request[0] == "start":
            pid = _fork(_agent_main, connection, *request[1:])
            codes.pop(pid, None)  # of an orphan of an earlier job: the system uses numbers again
            connection.send(pid)
        else:
            while request[1] not in codes:
                pid, status = os.waitpid(-1, 0)
                codes[pid] = os.waitstatus_to_exitcode(status)
            connection.send(codes.pop(request[1]))


def _fork(main: Callable[..., int], *args: Any) -> int:
    """Fork a process that ends with what `main` returns; its id."""
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _prctl(1, signal.SIGKILL)  # end with the parent
        if os.getppid() == parent:
            code = main(*args)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # an exception is being handled
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _agent_main(connection: Connection, payload: bytes, nproc: int, log: str, max_restarts: int) -> int:
    os.setsid()
    connection.close()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)

    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from instep.launch.engine import LaunchSpec, run

    go: list[int] = []

    def start_forked(self: Any, args: Any, env: dict[str, str]) -> Any:
        if env["LOCAL_RANK"] == "0":
            go[:] = os.pipe()
        forked = _Forked(_fork(_rank_main, payload, env, *go))
        if int(env["LOCAL_RANK"]) + 1 == nproc:
            for end in go:
                os.close(end)
        return forked

    SubprocessHandler._popen = start_forked  # type: ignore[method-assign]
    return run(LaunchSpec(nproc, ("forked",), max_restarts=max_restarts))


def _rank_main(payload: bytes, env: dict[str, str], go: int, until: int) -> int:
    os.setpgid(0, 0)  # the agent kills a rank by its group
    os.close(until)
    os.read(go, 1)  # all are forked: see `instep.launch.forked`
    os.close(go)
    os.environ.clear()
    os.environ.update(env)
    try:
        fn, args = pickle.loads(payload)
        fn(*args)
    except Exception:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exc()
            return 1
        raise
    return 0


class _Forked:
    """What the agent wants of `subprocess.Popen`, for a child that was forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _prctl(option: int, value: int = 1) -> None:
    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)
