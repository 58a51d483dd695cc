"""torchrun's elastic agent, with exit codes kept apart and ranks that get the time to save.

Where torch's `LocalElasticAgent` is changed, and why:

- It sends signals to a rank's whole process group, which kills the data loader workers that the rank still needs for
  its last step: here only the rank gets it.
- When one rank ends with a code other than 0 it sends SIGTERM to the others at once and waits 30 s: here a preempted
  rank's peers may finish their save, and a failed rank's peers get 5 s.
- Its rendezvous gives way to the one in `rendezvous`, under which ranks that are started again find each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from instep.errors import EXIT_FAILED, EXIT_HUNG, EXIT_PREEMPTED
from instep.launch.rendezvous import FixedNodes
from instep.launch.report import AGENT_PID, FailureReport, read_report

if TYPE_CHECKING:
    from instep.launch.engine import LaunchSpec

_PASSED_ON = {  # what the agent gets: what the ranks get
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone
    signal.SIGUSR1: signal.SIGUSR1,  # how batch systems announce the end of an allocation
    signal.SIGUSR2: signal.SIGUSR2,
}
_ALL_SIGNALS = (*_PASSED_ON, signal.SIGQUIT)
_AFTER_FAILURE_S = 5.0
_UNTIL_TERM_S = 1.0  # first the other ranks may end by themselves, each with its own last words
_POLL_S = 0.02

# Runs before the program, which then takes its place in the same process: the kernel keeps the parent-death signal
# over exec. Set in the rank and re-checked, because the agent may have died before it was set.
_BOOT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def run_agent(spec: LaunchSpec) -> int:
    """Run `spec` and return the job's exit code; see `instep.launch.engine.run`."""
    rendezvous = FixedNodes(spec)
    with (
        tempfile.TemporaryDirectory(prefix="instep-agent-") as folder,
        _environment(_rank_environment(spec)),
        _signals_restored() as handlers_before,
    ):
        workers = WorkerSpec(
            role="rank",
            local_world_size=spec.nproc,
            entrypoint=sys.executable,
            # The agent's class takes arguments for templates.
            args=tuple(word.replace("$", "$$") for word in _with_parent_death(spec.command)),
            rdzv_handler=rendezvous,
            max_restarts=spec.max_restarts,
            monitor_interval=0.1,
        )
        logs = DefaultLogsSpecs(log_dir=folder)
        agent = _Agent(workers, logs, shutdown_s=spec.shutdown_s, handlers_before=handlers_before)
        with contextlib.suppress(SignalException):  # the ranks have been told, waited for and counted
            agent.run()
    return agent.exit_code


def _with_parent_death(command: tuple[str, ...]) -> tuple[str, ...]:
    if sys.platform != "linux":
        return command
    return ("-I", "-S", "-c", _BOOT, str(os.getpid()), sys.executable, *command)


def _rank_environment(spec: LaunchSpec) -> dict[str, str]:
    added = {AGENT_PID: str(os.getpid()), **spec.env}
    if "OMP_NUM_THREADS" not in {**os.environ, **added}:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        added["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc))
    return added


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """The agent's class gives its own environment to the ranks and has no other way in."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_restored() -> Iterator[dict[signal.Signals, Any]]:
    before = {signum: signal.getsignal(signum) for signum in _ALL_SIGNALS}
    try:
        yield before
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in before.items():
                if handler is not None:
                    signal.signal(signum, handler)


def job_code(first: list[int], last: list[int], killed: bool) -> int:
    """The job's exit code.

    Args:
        first: the codes seen when the first rank ended badly; empty when none did before the end was asked for.
        last: the codes of all ranks in the end; negative for a signal.
        killed: a rank did not end in its time and was killed.
    """
    if EXIT_HUNG in first:  # who reports a hang comes first; what the others then die of is a consequence
        return EXIT_HUNG
    if killed or any(code not in (0, EXIT_PREEMPTED) for code in (*first, *last)):
        return EXIT_FAILED
    return EXIT_PREEMPTED if EXIT_PREEMPTED in last else 0


class _Agent(LocalElasticAgent):
    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: DefaultLogsSpecs,
        *,
        shutdown_s: float,
        handlers_before: Mapping[signal.Signals, Any],
    ) -> None:
        super().__init__(spec, logs_specs, exit_barrier_timeout=max(shutdown_s, _AFTER_FAILURE_S))
        self._shutdown_s = shutdown_s
        self._handlers_before = handlers_before
        self._received: list[signal.Signals] = []
        self.exit_code = EXIT_FAILED

    # --- the agent's own steps ---------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        pids = super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]
        self._take_signals()  # after each start: starting installs handlers that raise in the middle of anything
        return pids

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._handlers_before.items():
            ignored = handler is signal.SIG_IGN  # nohup, or a background job of a shell: stays ignored
            ours = signum in _PASSED_ON and not ignored
            signal.signal(signum, self._on_signal if ours else handler or signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: Any) -> None:
        self._received.append(signal.Signals(signum))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        codes = self._codes()
        if self._received or any(codes.values()):
            self._settle()
            return self._verdict(worker_group)
        if None in codes.values():
            return RunResult(state=WorkerState.HEALTHY)
        self.exit_code = 0
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        # Ranks still run here after an error in the agent, when another node asked for a new round, or when a signal
        # came between a start and `_take_signals`.
        if self._pcontext is None:
            return
        if None in self._codes().values():
            if isinstance(sys.exc_info()[1], SignalException):
                self._take_signals()
                self._received.append(death_sig)
                self._settle()
                self.exit_code = job_code(self._first, self._ended(), self._killed)
            else:
                self._settle(end_with=signal.SIGTERM)
        super()._shutdown(signal.SIGKILL)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _settle(self, end_with: signal.Signals | None = None) -> None:
        """Return when every rank has ended; what still runs at its deadline is killed.

        Args:
            end_with: end the ranks of a round that is over anyway; else the reason is a code or a signal received.
        """
        self._first: list[int] = []
        self._killed = False
        deadline = term_at = float("inf")
        told = 0
        failed = False
        if end_with is not None:
            self._send(end_with)
            deadline = time.monotonic() + _AFTER_FAILURE_S
        while True:
            now = time.monotonic()
            codes = self._codes()
            bad = [code for code in codes.values() if code]
            failing = any(code != EXIT_PREEMPTED for code in bad)
            if bad and not self._first and (failing or told == 0):
                self._first = bad
                deadline = min(deadline, now + self._shutdown_s)
            if failing and not failed:
                failed = True
                deadline = min(deadline, now + _AFTER_FAILURE_S)
                term_at = now + _UNTIL_TERM_S
            if None not in codes.values():
                return
            while told < len(self._received):
                signum = self._received[told]
                patience_s = _AFTER_FAILURE_S if told else self._shutdown_s
                told += 1
                deadline = min(deadline, now + patience_s)
                self._say_signal(signum, patience_s, told)
                self._send(_PASSED_ON.get(signum, signal.SIGTERM))
            if now >= term_at:
                term_at = float("inf")
                self._send(signal.SIGTERM)
            if now >= deadline:
                self._kill()
                return
            time.sleep(_POLL_S)

    def _verdict(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._ended()
        self.exit_code = job_code(self._first, ended, self._killed)
        if self.exit_code == 0:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._codes()))
        failures = self._failures()
        stop = self.exit_code == EXIT_PREEMPTED or bool(self._received)
        if self.exit_code != EXIT_PREEMPTED:
            self._say_failures(failures)
        elif (worker_group.group_world_size or 1) > 1:
            self._exit_barrier()  # node 0 holds the store, which the other nodes' ranks need until they have saved
        if stop:
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            count = worker_group.spec.max_restarts - self._remaining_restarts + 1
            _say(f"starting all ranks again (restart {count} of {worker_group.spec.max_restarts})")
        return RunResult(state=WorkerState.FAILED, failures=failures)

    # --- the ranks' processes ----------------------------------------------------------------------------------------

    def _processes(self) -> dict[int, Any]:
        """The ranks' processes by global rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._pcontext.subprocess_handlers
        return {worker.global_rank: handlers[worker.local_rank].proc for worker in self._worker_group.workers}

    def _codes(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in self._processes().items()}

    def _ended(self) -> list[int]:
        return [code for code in self._codes().values() if code is not None]

    def _send(self, signum: signal.Signals) -> None:
        for process in self._processes().values():
            process.send_signal(signum)

    def _kill(self) -> None:
        """SIGKILL to the ranks that still run, with all they started: each leads a session of its own."""
        running = [(rank, process) for rank, process in self._processes().items() if process.poll() is None]
        for rank, process in running:
            self._killed = True
            _say(f"rank {rank} (pid {process.pid}) did not end in its time and is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for _, process in running:
            process.wait()

    def _failures(self) -> dict[int, ProcessFailure]:
        assert isinstance(self._pcontext, SubprocessContext)
        files = self._pcontext.error_files
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        return {
            rank: ProcessFailure(
                local_rank=local[rank], pid=process.pid, exitcode=process.returncode, error_file=files[local[rank]]
            )
            for rank, process in self._processes().items()
            if process.returncode
        }

    # --- what is said ------------------------------------------------------------------------------------------------

    def _say_signal(self, signum: signal.Signals, patience_s: float, count: int) -> None:
        name = signum.name
        again = "; a second one cuts that short" if count == 1 else ""
        _say(f"{name}: passed on to the ranks, which have {patience_s:g} s to save and end{again}")

    def _say_failures(self, failures: Mapping[int, ProcessFailure]) -> None:
        assert isinstance(self._pcontext, SubprocessContext)
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        reports = {rank: read_report(self._pcontext.error_files[local[rank]]) for rank in failures}
        root = _root(failures, reports, self._first)
        for rank, failure in failures.items():
            report = reports[rank]
            if rank != root and report is not None:
                _say(f"rank {rank} ended with {_describe(failure.exitcode)}: {report.message.splitlines()[0]}")
        if root is None:
            return
        report = reports[root]
        how = _describe(failures[root].exitcode)
        if report is None:
            _say(f"rank {root} failed with {how}; what it said stands above")
        else:
            _say(f"rank {root} failed with {how}:\n{report.traceback.rstrip()}")


def _root(
    failures: Mapping[int, ProcessFailure], reports: Mapping[int, FailureReport | None], first: list[int]
) -> int | None:
    """The rank to blame: one that a signal ended first of all; the first to report an error of its own; else any first.

    Who was killed reports nothing, and the others then report their broken connections.
    """
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode in first and reports[rank] is None:
            return rank
    own = {rank: report for rank, report in reports.items() if report is not None and not report.remote}
    if own:
        return min(own, key=lambda rank: own[rank].time_ns)
    blamed = [code for code in first if code != EXIT_PREEMPTED]
    ranks = [rank for rank, failure in failures.items() if failure.exitcode in blamed]
    ranks += [rank for rank, failure in failures.items() if failure.exitcode != EXIT_PREEMPTED]
    return ranks[0] if ranks else None


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name} (if nobody sent it: out of memory)" if name == "SIGKILL" else name


def _say(text: str) -> None:
    sys.stderr.write(f"instep: {text}\n")
    sys.stderr.flush()
