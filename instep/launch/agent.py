"""The agent of a node: it distinguishes exit codes, gives ranks time to save, and sends messages to other agents.

Differences from torch's elastic agent, in addition to those in `torch_agent`:

- After one rank has ended with a code other than 0, the other ranks may finish their saves if the rank was preempted;
  if it failed, they get 5 s.
- torch's agents notice a failure on another node only when the connections of their own ranks break, and each agent
  counts its restarts alone. Here the agents send each other messages (`node_channel`). So all ranks end within seconds,
  all agents report the same cause, and they share one count of restarts.
- torch's agent waits only 5 minutes for other nodes after its own ranks are done; here every agent waits for the last
  node.
- torch's rendezvous is replaced by the ones in `rendezvous`, so that restarted ranks connect to each other.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException

from instep.errors import EXIT_FAILED, EXIT_HUNG, EXIT_PREEMPTED, InstepError
from instep.health.hang_report import NodeWatch, in_time
from instep.health.root_cause import RankEnd, find_cause, job_code
from instep.health.run_status import NAME, finish_status, name_cause
from instep.launch.forked import Failure, Forked
from instep.launch.node_channel import Alarm, NodeChannel, Round, open_round
from instep.launch.prepare import (
    agent_folder,
    entrypoint,
    environment,
    job_environment,
    private_environment,
    secret_of,
    signals_restored,
)
from instep.launch.ranks import Ranks
from instep.launch.rendezvous import Nodes, make_rendezvous
from instep.launch.spec import LaunchSpec
from instep.launch.torch_agent import TorchAgent, logs
from instep.state.environment import JOB_ID, RESTART
from instep.utils.untrusted_files import clean

_PASSED_ON = {  # signal to the agent -> signal that the agent sends to the ranks
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # SIGHUP means that the terminal was closed
    signal.SIGUSR1: signal.SIGUSR1,  # batch systems announce the end of an allocation by this signal
    signal.SIGUSR2: signal.SIGUSR2,
}
_STARTING_S = 300.0
_ALL_SIGNALS = (*_PASSED_ON, signal.SIGQUIT)
_AFTER_FAILURE_S = 5.0
_UNTIL_TERM_S = 1.0  # seconds from a failure to SIGTERM, so that other ranks may end with messages of their own
_POLL_S = 0.02
_SAID_S = 1.0  # seconds that the failing rank's agent waits for reports of other agents, so that its report comes last

# Rendezvous objects of jobs from which this node was cut off. Keep them alive: their threads still wait for an answer.
_unfinished: list[Nodes] = []


def run_agent(spec: LaunchSpec, forked: Forked | None = None) -> int:
    """Run the job of `spec` on this node, and return the job's exit code; see `instep.launch.engine.run`.

    Args:
        spec: the job.
        forked: function for the ranks, which are then forked from this process; None: the ranks run the command of
            `spec`.
    """
    program, args = (forked.run, ()) if forked else entrypoint(spec)
    secret = secret_of(spec)
    with (
        agent_folder() as folder,
        environment(job_environment(spec, again=forked is None)),
        environment(private_environment(secret, Path(folder))),
        closing(make_rendezvous(spec, secret, Path(folder))) as rendezvous,
        signals_restored(_ALL_SIGNALS) as handlers_before,
        environment((watch := NodeWatch(Path(folder), spec.nproc)).environment(os.environ)),
    ):
        workers = WorkerSpec(
            role="rank",
            local_world_size=spec.nproc,
            entrypoint=program,
            args=args,
            rdzv_handler=rendezvous,
            max_restarts=spec.max_restarts,
            monitor_interval=0.1,
        )
        agent = NodeAgent(spec, workers, folder, forked, rendezvous, watch, handlers_before)
        try:
            agent.run()
        # The signal came while ranks started. `end_ranks` has passed it on to the ranks, waited until they ended, and
        # set the agent's exit code.
        except SignalException as got:
            if forked is not None and got.sigval == signal.SIGINT:
                forked.interrupted = True
        except InstepError as error:
            if not agent.has_begun:
                raise
            _say(str(error))
    return agent.exit_code


class NodeAgent:
    """The agent of one node, with the methods that torch's agent calls at each of its steps.

    Args:
        spec: the job.
        workers: the same job in the form that torch's agent accepts.
        folder: temporary folder of the agent.
        forked: function that forked ranks run; None: the ranks run a program.
        rendezvous: rendezvous at which the agents of all nodes connect.
        watch: object that watches the heartbeats of the ranks and detects hangs.
        handlers_before: signal handlers of this process, which are restored at the end.

    Attributes:
        has_begun: whether the agents of all nodes have connected.
        exit_code: exit code of the job.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        workers: WorkerSpec,
        folder: str,
        forked: Forked | None,
        rendezvous: Nodes,
        watch: NodeWatch,
        handlers_before: Mapping[signal.Signals, Any],
    ) -> None:
        self._torch = TorchAgent(workers, logs(spec, folder), forked is not None, self)
        self._max_restarts = spec.max_restarts
        self._forked = forked
        self._nodes = rendezvous
        self._watch = watch
        self._hung = False
        self._shutdown_s = spec.shutdown_s
        self._handlers_before = handlers_before
        self._received: list[signal.Signals] = []
        self._first_restart = int(os.environ[RESTART])
        self._channel: NodeChannel | None = None
        self._known: Ranks | None = None
        self._round = Round(0, "", 0)
        self.has_begun = False
        self.exit_code = EXIT_FAILED

    def run(self) -> None:
        """Run the job; `exit_code` says how it ended."""
        self._torch.run()

    @property
    def _ranks(self) -> Ranks:
        """The ranks on this node that were started last."""
        processes = self._torch.processes
        assert processes is not None
        if self._known is None or self._known.processes is not processes:
            self._known = Ranks(processes, _say)
        return self._known

    @property
    def _talk(self) -> NodeChannel:
        """Channel to the agents of the other nodes in this round."""
        assert self._channel is not None
        return self._channel

    # ---- methods that torch's agent calls at its steps

    @contextmanager
    def starting(self, group: WorkerGroup) -> Iterator[None]:
        """Open a round before its ranks start; after the start, replace the signal handlers of torch's agent.

        A round lasts from a start of the ranks until they have ended.
        """
        self._open_round(group)
        self._watch.reset()
        self._hung = False
        self._started = time.monotonic()
        with nullcontext() if self._forked is None else self._forked.starting(group.spec.local_world_size):
            yield
        self._take_signals()

    def _open_round(self, group: WorkerGroup) -> None:
        node, nodes = group.group_rank, group.group_world_size
        meeting: Any = group.store
        assert node is not None
        assert nodes is not None
        assert meeting is not None
        talk = self._nodes.connect()
        self._round = open_round(talk, meeting, node, os.environ[JOB_ID])
        os.environ[JOB_ID] = self._round.job
        os.environ[RESTART] = str(self._first_restart + self._round.number)
        count_waiting = self._nodes.count_waiting if self._nodes.elastic else None
        self.has_begun = True
        self._channel = NodeChannel(talk, self._round, node, nodes, self._nodes.patience_s, count_waiting)

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._handlers_before.items():
            # A signal that was ignored before stays ignored, as under nohup and in a background job of a shell.
            ignored = handler is signal.SIG_IGN
            ours = signum in _PASSED_ON and not ignored
            signal.signal(signum, self._on_signal if ours else handler or signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: Any) -> None:
        self._received.append(signal.Signals(signum))
        if self._forked is not None and signum == signal.SIGINT:
            self._forked.interrupted = True

    def monitor(self) -> RunResult:
        """Check the ranks, and end the round if there is a reason to."""
        channel = self._talk
        codes = self._ranks.codes()
        self._watch.note_ends(codes)
        if not self._hung and self._watch.hangs(says_so=EXIT_HUNG in codes.values()):
            self._hung = True
            _say(self._watch.report())
        if self._hung or self._received or any(codes.values()) or channel.alarm or channel.waiting or channel.cut_off:
            if EXIT_PREEMPTED in codes.values():
                channel.refresh()  # look whether another node has asked all ranks to end so that a new node can join
            self._end_round()
            return self._verdict()
        if None in codes.values() or not channel.all_done():
            return RunResult(state=WorkerState.HEALTHY)
        self.exit_code = 0
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))

    def leave(self) -> None:
        """Wait until the other agents have read what they need from this agent's store."""
        self._talk.exchange("left", True, _AFTER_FAILURE_S)

    def end_ranks(self, signum: signal.Signals) -> None:
        """End running ranks after an error in the agent, or after a signal while ranks start or end."""
        if not self._ranks.running():
            return
        if isinstance(sys.exc_info()[1], SignalException):
            self._take_signals()
            self._received.append(signum)
            self._end_round()
            self.exit_code = job_code(self._first, self._ranks.ended(), bool(self._ranks.killed))
        else:
            self._end_round(end_with=signal.SIGTERM)

    def close(self) -> None:
        """Close the channel to the other agents; a second call does nothing."""
        if self._channel is not None:
            self._channel.close()

    # ---- ending a round

    def _end_round(self, end_with: signal.Signals | None = None) -> None:
        """Wait until every rank has ended; kill ranks that still run at the deadline.

        Args:
            end_with: signal to send to the ranks at once, after an error in the agent. None: the round ends for another
                reason: an exit code, a hang, a signal to this agent, or a message of another agent.
        """
        channel, ranks = self._talk, self._ranks
        self._first: list[int] = [EXIT_HUNG] if self._hung else []
        self._early = False
        deadline = term_at = float("inf")
        told = 0
        failed = growing = False
        if self._hung:
            deadline = time.monotonic()  # ranks that can run have reported and ended; the others are killed at once
        elif end_with is not None:
            ranks.send(end_with)
            deadline = time.monotonic() + _AFTER_FAILURE_S
        elif channel.waiting and not channel.alarm:
            channel.raise_alarm("grow")
        while True:
            now = time.monotonic()
            codes = ranks.codes()
            bad = [code for code in codes.values() if code]
            failing = any(code != EXIT_PREEMPTED for code in bad)
            alarm = channel.alarm
            if bad and not self._first and (failing or told == 0) and not (failed or growing):
                self._first = bad
                self._early = now - self._started < _STARTING_S
                deadline = min(deadline, now + self._shutdown_s)
            if (failing or self._hung) and alarm is None and end_with is None:
                channel.raise_alarm("failed")
            if not failed and (failing or channel.cut_off or (alarm is not None and alarm.kind != "grow")):
                failed = True
                deadline = min(deadline, now + _AFTER_FAILURE_S)
                term_at = now + _UNTIL_TERM_S
            if None not in codes.values():
                return
            if alarm is not None and alarm.kind == "grow" and not growing:
                growing = True
                deadline = min(deadline, now + self._shutdown_s)
                _say("another node has come: the ranks save, and start again with it")
                ranks.send(signal.SIGTERM)
            while told < len(self._received):
                signum = self._received[told]
                patience_s = _AFTER_FAILURE_S if told else self._shutdown_s
                told += 1
                deadline = min(deadline, now + patience_s)
                self._say_signal(signum, patience_s, told)
                ranks.send(_PASSED_ON.get(signum, signal.SIGTERM))
            if now >= term_at:
                term_at = float("inf")
                ranks.send(signal.SIGTERM)
            if now >= deadline:
                ranks.kill()
                return
            time.sleep(_POLL_S)

    def _verdict(self) -> RunResult:
        """Decide how the round has ended, and whether another round follows; all agents decide the same."""
        channel, ranks = self._talk, self._ranks
        ranks.processes.stop_tails()
        ends = ranks.bad_ends(self._first, self._watch.beats)
        mine = {
            "first": self._first,
            "last": ranks.ended(),
            "killed": bool(ranks.killed),
            "early": self._early,
            "stop": bool(self._received),
            "ends": [end.as_json() for end in ends],
        }
        told = self._exchange(mine)
        alarm, cut_off = channel.alarm, channel.cut_off if len(told) < channel.nodes else ""
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
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks.codes()))
        stop = any(of["stop"] for of in told.values()) or bool(cut_off) or (bool(lost) and not self._nodes.elastic)
        if grown and not stop:
            self._nodes.renew = True
            return RunResult(state=WorkerState.HEALTHY)
        restart = self._round.failures + 1
        again = code != EXIT_PREEMPTED and not stop and restart <= self._max_restarts
        if code != EXIT_PREEMPTED and not self._hung:
            others = [RankEnd.from_json(end) for node, of in told.items() if node != channel.node for end in of["ends"]]
            self._say_failures(ends, others, lost, last=not again)
        if again:
            channel.count_failure()
            _say(f"starting all ranks again (restart {restart} of {self._max_restarts})")
        elif not cut_off:
            self.leave()
        if cut_off:
            _unfinished.append(self._nodes)
        self._torch.allow_restarts(self._max_restarts - restart + 1 if again else 0)
        return RunResult(state=WorkerState.FAILED, failures=ranks.processes.failures())

    def _exchange(self, mine: dict[str, Any]) -> dict[int, Any]:
        """Exchange the outcome of the round with the other nodes; nodes that do not answer in time are left out."""
        channel = self._talk
        if not (channel.alarm or channel.cut_off):
            told = channel.exchange("saved", mine, self._shutdown_s)
            if not channel.alarm:
                return told
        if channel.alarm is None:
            return {channel.node: mine}
        patience_s = self._shutdown_s if channel.alarm.kind == "grow" else _AFTER_FAILURE_S
        return channel.exchange("end", mine, patience_s + _UNTIL_TERM_S)

    @staticmethod
    def _lost(alarm: Alarm | None, told: Mapping[int, Any]) -> str:
        """Return a sentence about nodes that no longer answer; "" if all nodes answer."""
        if alarm is not None and alarm.kind == "lost":
            return alarm.text
        silent = [] if alarm is None else [str(node) for node in range(alarm.nodes) if node not in told]
        return f"node {', '.join(silent)} has gone, or is cut off" if silent else ""

    # ---- reports

    def _say_signal(self, signum: signal.Signals, patience_s: float, count: int) -> None:
        name = signum.name
        again = "; a second one cuts that short" if count == 1 else ""
        _say(f"{name}: passed on to the ranks, which have {patience_s:g} s to save and end{again}")

    def _say_failures(self, ends: list[RankEnd], others: list[RankEnd], lost: str, last: bool) -> None:
        """Report how this node's ranks have ended; the agent of the rank that caused the failure reports last."""
        channel = self._talk
        cause = None if lost else find_cause([*ends, *others], channel.alarm.node if channel.alarm else 0)
        self._finish_status(cause, lost, [*ends, *others])
        for end in ends:
            if end is not cause and end.report is not None:
                _say(f"{end.title} ended with {end.how}: {end.message}")
        mine = cause is not None and cause in ends
        if lost:
            _say(f"{lost}; its ranks are lost")
        elif cause is not None and not mine:
            said = f": {cause.message}" if cause.message else ""
            _say(f"{cause.title} failed with {cause.how}{said}; the output of its node has more")
        if channel.nodes > 1 and not lost:  # agents may print to one terminal, where the cause should come last
            channel.exchange("said", True, _SAID_S if mine else 0.0)
        if cause is None or not mine:
            return
        if self._forked is not None and last:
            # The program that forked the ranks raises this failure itself.
            self._forked.failure = Failure(cause.rank, cause.how, cause.report)
        elif cause.report is None:
            file = self._ranks.processes.stderr_of(cause.rank)
            spoke = f"what it said is in {file}" if file else "anything it said stands above"
            _say(f"{cause.title} failed with {cause.how}; {spoke}")
        else:
            _say(f"{cause.title} failed with {cause.how}:\n{cause.report.traceback.rstrip()}")

    def _finish_status(self, cause: RankEnd | None, lost: str, ends: list[RankEnd]) -> None:
        """Write the cause into `status.json` and `failures`, if rank 0 was on this node and has not done so."""
        main = self._ranks.main_process()
        if main is None or (cause is None and not lost):
            return
        signal_name = self._received[0].name if self._received else None
        own = cause is not None and cause.rank == 0
        if cause is None:
            error = f"{lost}; its ranks are lost"
        elif cause.rank in self._ranks.killed:
            after = f" after {signal_name}" if signal_name else ""
            error = f"{cause.title} did not end in its time{after}, and was killed"
        elif cause.report is None:
            error = f"{cause.title} ended with {cause.how}"
        else:
            error = cause.report.message if own else f"{cause.title}: {cause.report.message}"
        pid, folder = main
        failures = [(end.rank, end.facts, end is cause) for end in ends if end.code != EXIT_PREEMPTED]

        def finish() -> None:
            finish_status(folder, pid, error, signal_name, own)
            name_cause(folder, pid, failures)

        problem = in_time(finish)
        if problem:
            _say(f"{folder / NAME} could not be finished: {problem}")


def _say(text: str) -> None:
    sys.stderr.write(clean(f"instep: {text}\n"))
    sys.stderr.flush()
