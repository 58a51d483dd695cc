"""The ranks of one round on this node, as the agent sees them: processes, exit codes, signals, ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from instep.health.error_report import read_report, read_run_folder
from instep.health.heartbeat_file import Beats
from instep.health.root_cause import RankEnd
from instep.launch.forked import ForkedRank


class Ranks:
    """See the module.

    Args:
        context: torch's, of the processes that were started.
        group: which rank each of them is.
        forked: they were forked from this process, and are no programs of their own.
        say: prints a line.

    Attributes:
        killed: those that did not end in their time.
    """

    def __init__(self, context: Any, group: WorkerGroup, forked: bool, say: Callable[[str], None]) -> None:
        self.context = context
        self._node = group.group_rank or 0
        self._local = {worker.global_rank: worker.local_rank for worker in group.workers}
        self._forked = forked
        self._say = say
        self._alone: set[int] | None = None  # ranks that had ended before any was sent a signal
        self.killed: list[int] = []

    def _processes(self) -> dict[int, Any]:
        """By global rank, as `subprocess.Popen` or alike."""
        context = self.context
        if self._forked:
            return {rank: ForkedRank(context._pc.processes[index]) for rank, index in self._local.items()}
        return {rank: context.subprocess_handlers[index].proc for rank, index in self._local.items()}

    def codes(self) -> dict[int, int | None]:
        """Each rank's exit code, negative for a signal; None while it runs."""
        return {rank: process.poll() for rank, process in self._processes().items()}

    def ended(self) -> list[int]:
        """The exit codes of those that have ended."""
        return [code for code in self.codes().values() if code is not None]

    def running(self) -> bool:
        """Whether one still runs."""
        return None in self.codes().values()

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to all that run, and to nothing that they have started."""
        self._note_ends()
        for process in self._processes().values():
            process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL to the ranks that still run, with all they started: each leads a session of its own."""
        self._note_ends()
        running = [(rank, process) for rank, process in self._processes().items() if process.poll() is None]
        for rank, process in running:
            self.killed.append(rank)
            self._say(f"rank {rank} (pid {process.pid}) did not end in its time and is killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for _, process in running:
            process.wait()

    def _note_ends(self) -> set[int]:
        if self._alone is None:
            self._alone = {rank for rank, code in self.codes().items() if code is not None}
        return self._alone

    def bad_ends(self, first: Sequence[int], beats: Beats) -> list[RankEnd]:
        """Those that ended badly.

        Args:
            first: the codes seen when the first of them did.
            beats: tells how far they were.
        """
        steps, host = beats.read(), socket.gethostname()
        alone = self._note_ends()  # who was killed may become known after those whose connections broke
        return [
            RankEnd(
                rank,
                self._node,
                host,
                code,
                code in first or (code < 0 and rank in alone),
                read_report(self.context.error_files[self._local[rank]]),
                step if (step := steps[self._local[rank]].step) > 0 else None,
            )
            for rank, code in self.codes().items()
            if code
        ]

    def main_process(self) -> tuple[int, Path] | None:
        """Rank 0's process id and the run folder it told of; None where it is on another node, or told of none."""
        if 0 not in self._local:
            return None
        folder = read_run_folder(self.context.error_files[self._local[0]])
        return None if folder is None else (self._processes()[0].pid, folder)

    def failures(self) -> dict[int, ProcessFailure]:
        """The same, as torch's agent has it."""
        files = self.context.error_files
        return {
            rank: ProcessFailure(self._local[rank], process.pid, process.returncode, files[self._local[rank]])
            for rank, process in self._processes().items()
            if process.returncode
        }

    def stderr_of(self, rank: int) -> str:
        """The file of what a rank printed; empty where it went to the console."""
        return self.context.stderrs[self._local[rank]]

    def stop_tails(self) -> None:
        """What the ranks have printed comes before what is said of them."""
        for tail in self.context._tail_logs:
            tail.stop()
        sys.stdout.flush()

    def close_logs(self) -> None:
        """Close the files of what they printed: torch leaves them open."""
        handlers: dict[int, Any] = getattr(self.context, "subprocess_handlers", {})
        for handler in handlers.values():
            for file in (handler._stdout, handler._stderr):
                if file is not None:
                    file.close()
