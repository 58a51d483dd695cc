"""All changes to torch's elastic agent, and all private names of torch that the engine uses.

`LocalElasticAgent` starts ranks, checks them ten times a second, restarts them and reports failures. This module
changes four of its steps:

- `_start_workers`: torch installs signal handlers that may raise anywhere; afterwards `Steps` installs its own.
- `_monitor_workers`: as soon as one rank ends with a code other than 0, torch sends SIGTERM to the whole process group
  of each rank, with its data loader workers, and waits 30 s. Here `Steps` decides, and only the ranks get a signal.
- `_exit_barrier`: torch's method waits up to 5 minutes for agents that may be gone; `Steps` waits only a few seconds.
- `_shutdown`: torch calls this method also after an error or a signal; here `Steps` ends the ranks first.

`tests/launch/test_torch_agent.py` checks that the installed torch still has what this module uses.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from instep.launch.forked import ForkedRank
from instep.launch.spec import LaunchSpec
from instep.state.environment import RESTART


class Steps(Protocol):
    """Methods that torch's agent calls at each of its steps; `NodeAgent` implements them.

    A round lasts from a start of the ranks until they have ended.
    """

    def starting(self, group: WorkerGroup) -> AbstractContextManager[None]:
        """Return a context in which ranks are started; this node's number and the round's store are known by then."""
        ...

    def monitor(self) -> RunResult:
        """Check the ranks, and end the round if there is a reason to. torch's agent acts on the state in the result."""
        ...

    def leave(self) -> None:
        """Wait for the other agents, after a round that ended well."""
        ...

    def end_ranks(self, signum: signal.Signals) -> None:
        """End running ranks, for a signal or because of an error in the agent."""
        ...

    def close(self) -> None:
        """Release resources; may be called twice."""
        ...


class TorchAgent(LocalElasticAgent):
    """torch's agent, which calls the methods of `Steps` at its steps.

    Args:
        workers: torch's description of what the ranks run, and how the agents connect.
        logs_specs: torch's description of where the ranks print.
        forked: whether the ranks are forks of this process.
        steps: the methods that are called.
    """

    def __init__(self, workers: WorkerSpec, logs_specs: DefaultLogsSpecs, forked: bool, steps: Steps) -> None:
        start = "fork" if forked else "spawn"
        super().__init__(workers, logs_specs, start, log_line_prefix_template="[rank ${rank}]: ")
        self._forked = forked
        self._steps = steps
        self._processes: Processes | None = None

    @property
    def processes(self) -> Processes | None:
        """The processes of the latest start, even if a signal interrupted the start; None before the first start."""
        if self._pcontext is None:
            return None
        if self._processes is None or self._processes.context is not self._pcontext:
            self._processes = Processes(self._pcontext, self._worker_group, self._forked)
        return self._processes

    def allow_restarts(self, count: int) -> None:
        """Set how many restarts torch's agent may still make; the agents of all nodes share one count."""
        self._remaining_restarts = count

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        with self._steps.starting(worker_group):
            return super()._start_workers(worker_group)  # pyright: ignore[reportCallIssue]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._steps.monitor()

    def _exit_barrier(self) -> None:
        self._steps.leave()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        processes = self.processes
        if processes is not None:
            self._steps.end_ranks(death_sig)
            super()._shutdown(signal.SIGKILL)
            processes.close_logs()
        self._steps.close()


class Processes:
    """The processes of the ranks that were started together, by global rank.

    Args:
        context: torch's context of the processes.
        group: torch's group of workers, with the rank of each process.
        forked: whether the processes were forked from this process; otherwise they run a program.
    """

    def __init__(self, context: Any, group: WorkerGroup, forked: bool) -> None:
        self.context = context
        self.node = group.group_rank or 0
        self.local = {worker.global_rank: worker.local_rank for worker in group.workers}
        self._forked = forked

    def by_rank(self) -> dict[int, Any]:
        """Return the process of each rank: a `subprocess.Popen`, or an object with the same methods."""
        context = self.context
        if self._forked:
            return {rank: ForkedRank(context._pc.processes[index]) for rank, index in self.local.items()}
        return {rank: context.subprocess_handlers[index].proc for rank, index in self.local.items()}

    def error_file(self, rank: int) -> str:
        """Return the file in which a rank reports its error."""
        return self.context.error_files[self.local[rank]]

    def stderr_of(self, rank: int) -> str:
        """Return the file with a rank's stderr; "" if stderr went to the console."""
        return self.context.stderrs[self.local[rank]]

    def failures(self) -> dict[int, ProcessFailure]:
        """Return the ranks that ended with an exit code other than 0, in the form that torch's agent uses."""
        return {
            rank: ProcessFailure(self.local[rank], process.pid, process.returncode, self.error_file(rank))
            for rank, process in self.by_rank().items()
            if process.returncode
        }

    def stop_tails(self) -> None:
        """Print the ranks' remaining output, so that it comes before any message about the ranks."""
        tails = getattr(self.context, "_tail_logs", None)
        if tails is None:  # torch 2.9 has two attributes in place of this list
            tails = (self.context._stdout_tail, self.context._stderr_tail)
        for tail in tails:
            tail.stop()
        sys.stdout.flush()

    def close_logs(self) -> None:
        """Close the files of the ranks' output, which torch leaves open."""
        handlers: Iterable[Any] = getattr(self.context, "subprocess_handlers", {}).values()
        for handler in handlers:
            for file in (handler._stdout, handler._stderr):
                if file is not None:
                    file.close()


def logs(spec: LaunchSpec, folder: str) -> DefaultLogsSpecs:
    """Return torch's description of where ranks print; without `log_dir`, `folder` gets only the error reports."""
    if spec.log_dir is None:
        return _Logs(folder)
    tee = Std.ALL if spec.tee is True else dict.fromkeys(spec.tee or (), Std.ALL)
    if tee and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # lines appear when they are printed
    return _Logs(os.path.expanduser(spec.log_dir), redirects=Std.ALL, tee=tee)


class _Logs(DefaultLogsSpecs):
    """Description of where ranks print, with a folder for each start; torch's own class deletes earlier files."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        counted = {rank: {**env, "TORCHELASTIC_RESTART_COUNT": os.environ[RESTART]} for rank, env in envs.items()}
        made = super().reify(counted)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = counted[rank]["TORCHELASTIC_ERROR_FILE"]
        return made
