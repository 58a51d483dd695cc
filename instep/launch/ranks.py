"""`Ranks`: the ranks that an agent has started on its node, with their exit codes and the signals for them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from instep.health.error_report import read_report, read_run_folder
from instep.health.heartbeat_file import HeartbeatFile
from instep.health.root_cause import RankEnd
from instep.launch.torch_agent import Processes


class Ranks:
    """The ranks that the agent of this node has started together; after a restart, a new object is made.

    Args:
        processes: the processes of the ranks.
        say: function that prints a line of text.

    Attributes:
        killed: ranks that were killed because they did not end in time.
    """

    def __init__(self, processes: Processes, say: Callable[[str], None]) -> None:
        self.processes = processes
        self._say = say
        self._alone: set[int] | None = None  # ranks that had ended before the agent sent the first signal
        self.killed: list[int] = []

    def codes(self) -> dict[int, int | None]:
        """Return each rank's exit code, which is negative for a signal, and None while the rank runs."""
        return {rank: process.poll() for rank, process in self.processes.by_rank().items()}

    def ended(self) -> list[int]:
        """List the exit codes of the ranks that have ended."""
        return [code for code in self.codes().values() if code is not None]

    def running(self) -> bool:
        """Return True if at least one rank still runs."""
        return None in self.codes().values()

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to all running ranks, but not to their child processes."""
        self._note_ends()
        for process in self.processes.by_rank().values():
            process.send_signal(signum)

    def kill(self) -> None:
        """Kill the running ranks with their child processes: each rank leads a process group, which gets the signal."""
        self._note_ends()
        running = [(rank, process) for rank, process in self.processes.by_rank().items() if process.poll() is None]
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

    def bad_ends(self, first: Sequence[int], beats: HeartbeatFile) -> list[RankEnd]:
        """Describe the ranks that ended with an exit code other than 0.

        Args:
            first: exit codes that were seen when the first rank failed.
            beats: heartbeats of the ranks, which show how far each rank was.
        """
        slots, host = beats.read(), socket.gethostname()
        # When a rank is killed, the connections of other ranks break. The agent may notice their ends before that of
        # the killed rank. So a rank that was killed before the agent sent a signal also counts as first.
        alone = self._note_ends()
        return [
            RankEnd(
                rank,
                self.processes.node,
                host,
                code,
                code in first or (code < 0 and rank in alone),
                read_report(self.processes.error_file(rank)),
                beat.step if beat.step > 0 else None,
                beat.batch if beat.batch >= 0 else None,
                beat.phase,
            )
            for rank, code in self.codes().items()
            if code
            for beat in (slots[self.processes.local[rank]],)
        ]

    def main_process(self) -> tuple[int, Path] | None:
        """Return the process id of rank 0 and the run folder that it reported; None if unknown on this node."""
        if 0 not in self.processes.local:
            return None
        folder = read_run_folder(self.processes.error_file(0))
        return None if folder is None else (self.processes.by_rank()[0].pid, folder)
