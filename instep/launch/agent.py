"""torchrun's elastic agent, with exit codes kept apart and ranks that get the time to save.

Where torch's `LocalElasticAgent` is changed, and why:

- It sends signals to a rank's whole process group, which kills the data loader workers that the rank still needs for
  its last step: here only the rank gets it.
- When one rank ends with a code other than 0 it sends SIGTERM to the others at once and waits 30 s: here a preempted
  rank's peers may finish their save, and a failed rank's peers get 5 s.
- Its agents learn of another node's failure when their own ranks' connections break, and count their restarts each for
  themselves: here they tell each other (`peers`), so that all ranks end within seconds, one cause is named, and all
  follow one count.
- It ends with the first node whose ranks are done: here all wait for the last one.
- Its rendezvous gives way to the ones in `rendezvous`, under which ranks that are started again find each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from instep.errors import EXIT_FAILED, EXIT_HUNG, EXIT_PREEMPTED, InstepError, SettingError
from instep.launch.affinity import share_cores
from instep.launch.blame import RankEnd, find_cause
from instep.launch.forked import Failure, Forked, ForkedRank
from instep.launch.hang_report import NodeWatch
from instep.launch.peers import Alarm, Peers, Round, open_round
from instep.launch.rendezvous import Nodes, make_rendezvous
from instep.launch.report import AGENT_PID, read_report
from instep.state.restarts import JOB_ID, MIN_NODES, RESTART, read_job

if TYPE_CHECKING:
    from instep.launch.engine import LaunchSpec

_PASSED_ON = {  # what the agent gets: what the ranks get
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # the terminal is gone
    signal.SIGUSR1: signal.SIGUSR1,  # how batch systems announce the end of an allocation
    signal.SIGUSR2: signal.SIGUSR2,
}
_ANNOUNCED = (-signal.SIGUSR1, -signal.SIGUSR2)  # the code of a rank that has no handler for the announcement
_STARTING_S = 300.0
_ALL_SIGNALS = (*_PASSED_ON, signal.SIGQUIT)
_AFTER_FAILURE_S = 5.0
_UNTIL_TERM_S = 1.0  # first the other ranks may end by themselves, each with its own last words
_POLL_S = 0.02
_SAID_S = 1.0  # the agent of the rank to blame lets the others speak first, for so long

# Runs before the program, which then takes its place in the same process: the kernel keeps the parent-death signal and
# the cores over exec. Set in the rank and re-checked, because the agent may have died before it was set.
_BOOT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
if sys.argv[2]:
    os.sched_setaffinity(0, map(int, sys.argv[2].split(";")[int(sys.argv[3])].split(",")))
os.execv(sys.argv[4], sys.argv[4:])
"""
_unfinished: list[Nodes] = []  # of nodes that were cut off: their threads wait for an answer, and are not waited for


def run_agent(spec: LaunchSpec, forked: Forked | None = None) -> int:
    """Run `spec` and return the job's exit code; see `instep.launch.engine.run`.

    Args:
        spec: what to run.
        forked: a function that the ranks run, forked from this process, in place of the command.
    """
    entrypoint, args = (forked.run, ()) if forked else _entrypoint(spec)
    rendezvous = make_rendezvous(spec)
    with (
        tempfile.TemporaryDirectory(prefix="instep-agent-") as folder,
        _environment(_rank_environment(spec, again=forked is None)),
        _signals_restored() as handlers_before,
        _environment((watch := NodeWatch(Path(folder), spec.nproc)).environment(os.environ)),
    ):
        workers = WorkerSpec(
            role="rank",
            local_world_size=spec.nproc,
            entrypoint=entrypoint,
            args=args,
            rdzv_handler=rendezvous,
            max_restarts=spec.max_restarts,
            monitor_interval=0.1,
        )
        agent = _Agent(workers, _logs(spec, folder), forked, rendezvous, watch, spec.shutdown_s, handlers_before)
        try:
            agent.run()
        except SignalException:  # the ranks have been told, waited for and counted
            pass
        except InstepError as error:
            if not agent.has_begun:
                raise
            _say(str(error))
    return agent.exit_code


def _entrypoint(spec: LaunchSpec) -> tuple[str, tuple[str, ...]]:
    program = shutil.which(spec.executable)
    if program is None:
        raise SettingError(
            f"executable={spec.executable!r} is not a program that can be run here: give its path, or put its folder "
            "into PATH",
            field="executable",
            got=spec.executable,
        )
    # The agent's class takes arguments for templates.
    command = tuple(word.replace("$", "$$") for word in (program, *spec.command))
    if sys.platform != "linux":
        if spec.cpu_affinity:
            raise SettingError("cpu_affinity works on Linux only: leave it out", field="cpu_affinity", got=True)
        return program, command[1:]
    cores = ";".join(",".join(map(str, share)) for share in share_cores(spec.nproc)) if spec.cpu_affinity else ""
    return sys.executable, ("-I", "-S", "-c", _BOOT, str(os.getpid()), cores, "${local_rank}", *command)


def _logs(spec: LaunchSpec, folder: str) -> DefaultLogsSpecs:
    if spec.log_dir is None:
        return _Logs(folder)
    tee = Std.ALL if spec.tee is True else dict.fromkeys(spec.tee or (), Std.ALL)
    if tee and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # lines appear when they are printed
    return _Logs(str(spec.log_dir), redirects=Std.ALL, tee=tee)


class _Logs(DefaultLogsSpecs):
    """A folder for every start: torch's own removes what a start left that was not counted as a restart."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        counted = {rank: {**env, "TORCHELASTIC_RESTART_COUNT": os.environ[RESTART]} for rank, env in envs.items()}
        logs = super().reify(counted)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = counted[rank]["TORCHELASTIC_ERROR_FILE"]
        return logs


def _rank_environment(spec: LaunchSpec, again: bool) -> dict[str, str]:
    """Variables for the ranks.

    Args:
        spec: the job.
        again: whether whoever started this agent may start it again; a notebook does not.
    """
    # Nor does SLURM with what is typed into a shell, and all that comes from one shell is of one step.
    known = read_job() if again and (JOB_ID in os.environ or not os.isatty(0)) else None
    job, restart = known or (uuid.uuid4().hex, 0)
    added = {AGENT_PID: str(os.getpid()), JOB_ID: job, RESTART: str(restart), **spec.env}
    if spec.min_nodes is not None:
        added[MIN_NODES] = str(spec.min_nodes)
    if spec.hang_timeout_s is not None:
        added["INSTEP_HANG_TIMEOUT_S"] = f"{spec.hang_timeout_s:g}"
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


def job_code(first: list[int], last: list[int], killed: bool, early: bool = False) -> int:
    """The job's exit code.

    Args:
        first: the codes seen when the first rank ended badly; empty when none did before the end was asked for.
        last: the codes of all ranks in the end; negative for a signal.
        killed: a rank did not end in its time and was killed.
        early: that first rank had started shortly before.
    """
    if EXIT_HUNG in first:  # who reports a hang comes first; what the others then die of is a consequence
        return EXIT_HUNG
    if early and any(code in _ANNOUNCED for code in first):
        return EXIT_PREEMPTED  # it came before the ranks could take it: nothing is lost
    if killed or any(code not in (0, EXIT_PREEMPTED) for code in (*first, *last)):
        return EXIT_FAILED
    return EXIT_PREEMPTED if EXIT_PREEMPTED in last else 0


class _Agent(LocalElasticAgent):
    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: DefaultLogsSpecs,
        forked: Forked | None,
        rendezvous: Nodes,
        watch: NodeWatch,
        shutdown_s: float,
        handlers_before: Mapping[signal.Signals, Any],
    ) -> None:
        start = "fork" if forked else "spawn"
        super().__init__(spec, logs_specs, start, log_line_prefix_template="[rank ${rank}]: ")
        self._forked = forked
        self._nodes = rendezvous
        self._watch = watch
        self._hung = False
        self._shutdown_s = shutdown_s
        self._handlers_before = handlers_before
        self._received: list[signal.Signals] = []
        self._first_restart = int(os.environ[RESTART])
        self._peers: Peers | None = None
        self._round = Round(0, "", 0)
        self.has_begun = False
        self.exit_code = EXIT_FAILED

    # --- the agent's own steps ---------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._close_peers()
        super()._rendezvous(worker_group)  # pyright: ignore[reportCallIssue]
        node, nodes = worker_group.group_rank, worker_group.group_world_size
        meeting: Store | None = worker_group.store
        assert node is not None
        assert nodes is not None
        assert meeting is not None
        talk = self._nodes.connect()
        self._round = open_round(talk, meeting, node, os.environ[JOB_ID])
        os.environ[JOB_ID] = self._round.job
        os.environ[RESTART] = str(self._first_restart + self._round.number)
        count_waiting = self._nodes.count_waiting if self._nodes.elastic else None
        self.has_begun = True
        self._peers = Peers(talk, self._round, node, nodes, self._nodes.patience_s, count_waiting)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._watch.begin()
        self._hung = False
        self._started = time.monotonic()
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
        if self._forked is not None and signum == signal.SIGINT:
            self._forked.interrupted = True

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        peers = self._peers
        assert peers is not None
        codes = self._codes()
        if not self._hung and self._watch.hangs(says_so=EXIT_HUNG in codes.values()):
            self._hung = True
            _say(self._watch.report())
        if self._hung or self._received or any(codes.values()) or peers.alarm or peers.waiting or peers.cut_off:
            if EXIT_PREEMPTED in codes.values():
                peers.refresh()  # the ranks may have been asked to make room for another node
            self._settle()
            return self._verdict(worker_group)
        if None in codes.values() or not peers.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        self.exit_code = 0
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))

    def _exit_barrier(self) -> None:
        """The agents' store must not go before all others have read there what they need."""
        assert self._peers is not None
        self._peers.exchange("left", True, _AFTER_FAILURE_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        # Ranks still run here after an error in the agent, or when a signal came between a start and `_take_signals`.
        if self._pcontext is not None:
            if None in self._codes().values():
                if isinstance(sys.exc_info()[1], SignalException):
                    self._take_signals()
                    self._received.append(death_sig)
                    self._settle()
                    self.exit_code = job_code(self._first, self._ended(), self._killed)
                else:
                    self._settle(end_with=signal.SIGTERM)
            super()._shutdown(signal.SIGKILL)
            self._close_logs()
        self._close_peers()

    def _close_logs(self) -> None:
        handlers: dict[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        for handler in handlers.values():
            for file in (handler._stdout, handler._stderr):
                if file is not None:
                    file.close()

    def _close_peers(self) -> None:
        if self._peers is not None:
            self._peers.close()

    # --- ending ------------------------------------------------------------------------------------------------------

    def _settle(self, end_with: signal.Signals | None = None) -> None:
        """Return when every rank has ended; what still runs at its deadline is killed.

        Args:
            end_with: end the ranks of a round that is over anyway; else the reason is a code, a signal received, or
                what another agent said.
        """
        peers = self._peers
        assert peers is not None
        self._first: list[int] = [EXIT_HUNG] if self._hung else []
        self._by_itself: set[int] | None = None  # ranks that had ended before any was sent a signal
        self._killed = self._early = False
        deadline = term_at = float("inf")
        told = 0
        failed = growing = False
        if self._hung:
            deadline = time.monotonic()  # who could say where it is has ended
        elif end_with is not None:
            self._send(end_with)
            deadline = time.monotonic() + _AFTER_FAILURE_S
        elif peers.waiting and not peers.alarm:
            peers.raise_alarm("grow")
        while True:
            now = time.monotonic()
            codes = self._codes()
            bad = [code for code in codes.values() if code]
            failing = any(code != EXIT_PREEMPTED for code in bad)
            alarm = peers.alarm
            if bad and not self._first and (failing or told == 0) and not (failed or growing):
                self._first = bad
                self._early = now - self._started < _STARTING_S
                deadline = min(deadline, now + self._shutdown_s)
            if (failing or self._hung) and alarm is None and end_with is None:
                peers.raise_alarm("failed")
            if not failed and (failing or peers.cut_off or (alarm is not None and alarm.kind != "grow")):
                failed = True
                deadline = min(deadline, now + _AFTER_FAILURE_S)
                term_at = now + _UNTIL_TERM_S
            if None not in codes.values():
                return
            if alarm is not None and alarm.kind == "grow" and not growing:
                growing = True
                deadline = min(deadline, now + self._shutdown_s)
                _say("another node has come: the ranks save, and start again with it")
                self._send(signal.SIGTERM)
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
        """How the round ended, and whether there is another one; all agents come to the same answer."""
        peers = self._peers
        assert peers is not None
        self._stop_tails()
        ends = self._bad_ends(worker_group)
        mine = {
            "first": self._first,
            "last": self._ended(),
            "killed": self._killed,
            "early": self._early,
            "stop": bool(self._received),
            "ends": [end.as_json() for end in ends],
        }
        told = self._exchange(mine)
        alarm, cut_off = peers.alarm, peers.cut_off if len(told) < peers.nodes else ""
        code = job_code(
            [code for of in told.values() for code in of["first"]],
            [code for of in told.values() for code in of["last"]],
            any(of["killed"] for of in told.values()),
            any(of["early"] for of in told.values()),
        )
        grown = alarm is not None and alarm.kind == "grow" and code in (0, EXIT_PREEMPTED)
        lost = cut_off or self._lost(alarm, told)
        if lost and code != EXIT_HUNG:
            code = EXIT_FAILED
        self.exit_code = code
        if code == 0 and not grown:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._codes()))
        stop = any(of["stop"] for of in told.values()) or bool(cut_off) or (bool(lost) and not self._nodes.elastic)
        if grown and not stop:
            self._nodes.renew = True
            return RunResult(state=WorkerState.HEALTHY)
        restart = self._round.failures + 1
        again = code != EXIT_PREEMPTED and not stop and restart <= worker_group.spec.max_restarts
        if code != EXIT_PREEMPTED and not self._hung:
            others = [RankEnd.from_json(end) for node, of in told.items() if node != peers.node for end in of["ends"]]
            self._say_failures(ends, others, lost, last=not again)
        if again:
            _say(f"starting all ranks again (restart {restart} of {worker_group.spec.max_restarts})")
        elif not cut_off:
            self._exit_barrier()
        if cut_off:
            _unfinished.append(self._nodes)
        self._remaining_restarts = worker_group.spec.max_restarts - restart + 1 if again else 0
        return RunResult(state=WorkerState.FAILED, failures=self._failures())

    def _exchange(self, mine: dict[str, Any]) -> dict[int, Any]:
        """What became of every node, by its number: of those that say so in time."""
        peers = self._peers
        assert peers is not None
        if not (peers.alarm or peers.cut_off):
            told = peers.exchange("saved", mine, self._shutdown_s)
            if not peers.alarm:
                return told
        if peers.alarm is None:
            return {peers.node: mine}
        patience_s = self._shutdown_s if peers.alarm.kind == "grow" else _AFTER_FAILURE_S
        return peers.exchange("end", mine, patience_s + _UNTIL_TERM_S)

    @staticmethod
    def _lost(alarm: Alarm | None, told: Mapping[int, Any]) -> str:
        """Which node does not answer any more; empty where all do."""
        if alarm is not None and alarm.kind == "lost":
            return alarm.text
        silent = [] if alarm is None else [str(node) for node in range(alarm.nodes) if node not in told]
        return f"node {', '.join(silent)} has gone, or is cut off" if silent else ""

    # --- the ranks' processes ----------------------------------------------------------------------------------------

    def _processes(self) -> dict[int, Any]:
        """The ranks' processes by global rank, as `subprocess.Popen` or alike."""
        context: Any = self._pcontext
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        if self._forked is not None:
            return {rank: ForkedRank(context._pc.processes[index]) for rank, index in local.items()}
        return {rank: context.subprocess_handlers[index].proc for rank, index in local.items()}

    def _codes(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in self._processes().items()}

    def _ended(self) -> list[int]:
        return [code for code in self._codes().values() if code is not None]

    def _note_ends(self) -> set[int]:
        if self._by_itself is None:
            self._by_itself = {rank for rank, code in self._codes().items() if code is not None}
        return self._by_itself

    def _send(self, signum: signal.Signals) -> None:
        self._note_ends()
        for process in self._processes().values():
            process.send_signal(signum)

    def _kill(self) -> None:
        """SIGKILL to the ranks that still run, with all they started: each leads a session of its own."""
        self._note_ends()
        running = [(rank, process) for rank, process in self._processes().items() if process.poll() is None]
        for rank, process in running:
            self._killed = True
            _say(f"rank {rank} (pid {process.pid}) did not end in its time and is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for _, process in running:
            process.wait()

    def _bad_ends(self, worker_group: WorkerGroup) -> list[RankEnd]:
        assert self._pcontext is not None
        files = self._pcontext.error_files
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        node, host = worker_group.group_rank or 0, socket.gethostname()
        steps = self._watch.beats.read()
        alone = self._note_ends()  # who was killed may become known after those whose connections broke
        return [
            RankEnd(
                rank,
                node,
                host,
                code,
                code in self._first or (code < 0 and rank in alone),
                read_report(files[local[rank]]),
                step if (step := steps[local[rank]].step) > 0 else None,
            )
            for rank, code in self._codes().items()
            if code
        ]

    def _failures(self) -> dict[int, ProcessFailure]:
        assert self._pcontext is not None
        files = self._pcontext.error_files
        local = {worker.global_rank: worker.local_rank for worker in self._worker_group.workers}
        return {
            rank: ProcessFailure(local[rank], process.pid, process.returncode, files[local[rank]])
            for rank, process in self._processes().items()
            if process.returncode
        }

    # --- what is said ------------------------------------------------------------------------------------------------

    def _stop_tails(self) -> None:
        """What the ranks have printed comes before what is said of them."""
        context: Any = self._pcontext
        for tail in context._tail_logs:
            tail.stop()
        sys.stdout.flush()

    def _say_signal(self, signum: signal.Signals, patience_s: float, count: int) -> None:
        name = signum.name
        again = "; a second one cuts that short" if count == 1 else ""
        _say(f"{name}: passed on to the ranks, which have {patience_s:g} s to save and end{again}")

    def _say_failures(self, ends: list[RankEnd], others: list[RankEnd], lost: str, last: bool) -> None:
        """What became of this node's ranks, and whose fault it was: that one's agent says it, after all the others."""
        peers = self._peers
        assert peers is not None
        cause = None if lost else find_cause([*ends, *others], peers.alarm.node if peers.alarm else 0)
        for end in ends:
            if end is not cause and end.report is not None:
                _say(f"{end.title} ended with {end.how}: {end.message}")
        mine = cause is not None and cause in ends
        if lost:
            _say(f"{lost}; its ranks are lost")
        elif cause is not None and not mine:
            said = f": {cause.message}" if cause.message else ""
            _say(f"{cause.title} failed with {cause.how}{said}; the output of its node has more")
        if peers.nodes > 1 and not lost:
            self._take_turns(mine)
        if cause is None or not mine:
            return
        if self._forked is not None and last:
            self._forked.failure = Failure(cause.rank, cause.how, cause.report)  # its caller raises it
        elif cause.report is None:
            _say(f"{cause.title} failed with {cause.how}; {self._where_it_spoke(cause)}")
        else:
            _say(f"{cause.title} failed with {cause.how}:\n{cause.report.traceback.rstrip()}")

    def _take_turns(self, last: bool) -> None:
        """Where several nodes write to one terminal the cause comes last: wait until the other agents have spoken."""
        assert self._peers is not None
        self._peers.exchange("said", True, _SAID_S if last else 0.0)

    def _where_it_spoke(self, end: RankEnd) -> str:
        assert self._pcontext is not None
        local = next(worker.local_rank for worker in self._worker_group.workers if worker.global_rank == end.rank)
        file = self._pcontext.stderrs[local]
        return f"what it said is in {file}" if file else "anything it said stands above"


def _say(text: str) -> None:
    sys.stderr.write(f"instep: {text}\n")
    sys.stderr.flush()
