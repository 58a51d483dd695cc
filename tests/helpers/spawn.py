"""Real processes for tests, each with a hard deadline.

`run_ranks` runs a function as N ranks on this machine (gloo, loopback) and returns what each rank returned.
`run_command` and `start_command` run a program in a process group of its own, which never outlives the test.

Example, in a test module:

    def my_rank():
        return int(os.environ["RANK"])

    assert run_ranks(my_rank, 2) == [0, 1]
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What nearly every rank imports: the fork server does so once, and a rank starts with it in a fraction of a second.
# torch's compiler is here because DistributedDataParallel imports it.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "pytest",
    "safetensors.torch",
    "instep.accelerator",
    "instep.callbacks",
    "instep.checkpoint",
    "instep.data",
    "instep.loggers",
    "instep.strategies.ddp",
    "instep.trainer",
)
HANG_S = 600.0  # what takes so long hangs, also on a machine that is slow and busy; a test that is done is done sooner
_LOG_TAIL_BYTES = 4000
_PORTS = 20000, 10000  # the first one, and how many
_LAST_PORT = f"/tmp/instep-test-port-{os.getuid()}"


class RanksFailed(AssertionError):
    """One rank or more failed or did not end in time.

    Args:
        message: every failed rank with its traceback and the end of its output.
        errors: the traceback by rank.
    """

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


def free_port() -> int:
    """A TCP port nobody listens on, below the range from which the kernel gives ports to outgoing connections.

    All processes of this machine's tests count in one file, so that no two of them get the same port one after another.
    """
    for _ in range(100):
        with open(_LAST_PORT, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            port = _PORTS[0] + (int(file.read() or random.SystemRandom().randrange(_PORTS[1])) + 1) % _PORTS[1]
            file.truncate(0)
            file.write(str(port - _PORTS[0]))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port found between 20000 and 30000 in 100 tries")


def run_ranks(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout_s: float = HANG_S,
    others_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(*args)` as `nproc` ranks and return the results by rank.

    Each rank is a new process with one torch thread and torchrun's variables set; the process group is made by
    whoever needs it (`PartialState()` or `init_process_group("gloo")`) and destroyed here at the end. Processes come
    from a fork server that has imported torch and instep, so that a rank starts in a fraction of a second and yet
    inherits nothing from the ranks before it.

    Args:
        fn: a function of a module's top level.
        nproc: the number of ranks.
        *args: passed to every rank, pickled.
        timeout_s: after so many seconds all ranks are killed; the error shows where each one stood.
        others_s: seconds that the other ranks get to end by themselves once one has failed.
        env: more environment variables for the ranks.

    Returns:
        What each rank returned (pickled; tensors are copied).

    Raises:
        RanksFailed: with the traceback and the output of each rank that failed, the first failure first.
    """
    from tests.helpers import gpu  # late: imports torch

    context: Any = multiprocessing.get_context("fork" if gpu.REHEARSES else "forkserver")
    if not gpu.REHEARSES:  # which forks this process, that has imported all and has no device to lose
        context.set_forkserver_preload(list(PRELOADED))
    common = {**os.environ, **_job_env(nproc), **(env or {})}
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes: dict[Any, int] = {}
        ranks: list[Any] = []
        try:
            for rank in range(nproc):
                receiver, sender = context.Pipe(duplex=False)
                log = Path(folder) / f"rank-{rank}.log"
                rank_env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = context.Process(target=_rank_main, args=(payload, rank_env, str(log), sender))
                process.start()
                sender.close()
                pipes[receiver] = rank
                ranks.append(process)
            results, errors = _collect(pipes, ranks, timeout_s, others_s)
            if errors:
                raise RanksFailed(_report(fn, nproc, errors, Path(folder)), errors)
            return [results[rank] for rank in range(nproc)]
        finally:
            for process in ranks:
                _kill(process)
            for receiver in pipes:
                receiver.close()


def _job_env(nproc: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _collect(
    pipes: Mapping[Any, int], ranks: Sequence[Any], timeout_s: float, others_s: float
) -> tuple[dict[int, Any], dict[int, str]]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_pipes = dict(pipes)
    deadline = time.monotonic() + timeout_s
    while open_pipes:
        ready: list[Any] = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(open_pipes.values())
            for rank in late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[rank].pid, signal.SIGQUIT)  # faulthandler writes the stacks into the rank's log
            ranks[late[0]].join(2.0)
            why = f"did not end within {others_s} s of the failure" if errors else f"ran past {timeout_s} s"
            errors.update({rank: f"rank {rank} {why}; it was killed, its stacks are in its output" for rank in late})
            break
        for receiver in ready:
            rank = open_pipes.pop(receiver)
            try:
                ok, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                ranks[rank].join(60.0)  # its pipe is closed: it is about to end
                ok, value = False, f"rank {rank} ended with exit code {ranks[rank].exitcode} and no result"
            if ok:
                results[rank] = value
            else:
                deadline = min(deadline, time.monotonic() + others_s)
                errors[rank] = value
    return results, errors


def _report(fn: Callable[..., Any], nproc: int, errors: Mapping[int, str], folder: Path) -> str:
    lines = [f"{fn.__qualname__} failed on rank {', '.join(map(str, errors))} of {nproc}"]
    for rank, error in errors.items():
        log = folder / f"rank-{rank}.log"
        output = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() if log.exists() else ""
        lines += ["", f"--- rank {rank} ---", error.strip()]
        if output:
            lines += [f"--- output of rank {rank} ---", output]
    return "\n".join(lines)


def _rank_main(payload: bytes, env: dict[str, str], log: str, sender: Connection) -> None:
    os.setpgid(0, 0)  # so that data loader workers are killed along with the rank
    os.environ.clear()  # a fork server's child has the environment of the server's start
    os.environ.update(env)
    output = open(log, "ab", buffering=0)  # noqa: SIM115 (open until the process ends)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.enable(output)  # a crash of torch's own code leaves the stacks in the report
    faulthandler.register(signal.SIGQUIT, file=output, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    # As in a program: else a rank whose loader has workers starts a fork server of its own, which imports all again.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)

    import torch  # in the fork server already; kept out of this module so that collecting tests stays fast
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        fn, args = pickle.loads(payload)
        answer = pickle.dumps((True, fn(*args)))
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:  # SystemExit too: a rank that left early did not return a result
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        _flush()
        os._exit(1)  # at once: closed sockets tell the other ranks
    sender.send_bytes(answer)
    _flush()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _kill(process: Any) -> None:
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.is_alive() and os.getpgid(process.pid) == process.pid:
                process.join(2.0)  # its answer is in; normally it is about to exit
            os.killpg(process.pid, signal.SIGKILL)
    process.join(60.0)
    if process.is_alive():
        process.kill()
        process.join(60.0)
    process.close()


def without_greetings(text: str) -> str:
    """Output without what gloo says on stdout, in pieces, when a group has met: torch 2.9's does."""
    if "[Gloo]" not in text:
        return text
    text = re.sub(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks.* is : \d+\n", "", text)
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.strip() and not re.search(r"\[Gloo\]|connected|peer ranks", line))


@dataclass(frozen=True)
class Finished:
    """A program that ended: its exit status (negative: by that signal) and its output, without gloo's greetings."""

    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def start_command(
    argv: Sequence[str], *, env: Mapping[str, str | None] | None = None, cwd: str | Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own; the group is killed when the block is left.

    Args:
        argv: the program and its arguments.
        env: variables to set, or to remove where the value is None.
        cwd: the folder to run in.
    """
    full: dict[str, str] = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name, value in (env or {}).items():
        full.pop(name, None)
        if value is not None:
            full[name] = value
    process = subprocess.Popen(
        list(argv),
        env=full,
        cwd=cwd,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finish(process: subprocess.Popen[str], timeout_s: float = HANG_S) -> Finished:
    """Wait for a program's end; AssertionError with its output if it is still running after `timeout_s` seconds."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=HANG_S)
        raise AssertionError(f"{process.args} ran past {timeout_s} s\n{stdout}\n{stderr}") from None
    return Finished(process.returncode, without_greetings(stdout), stderr)


def run_command(
    argv: Sequence[str],
    *,
    timeout_s: float = HANG_S,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path | None = None,
) -> Finished:
    """Run a program to its end within `timeout_s` seconds; the arguments are those of `start_command`."""
    with start_command(argv, env=env, cwd=cwd) as process:
        return finish(process, timeout_s)
