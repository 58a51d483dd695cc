"""Root cause of a failed job: the rank whose failure caused the others', and the exit code of the job."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from instep.errors import EXIT_FAILED, EXIT_HUNG, EXIT_PREEMPTED
from instep.health.error_report import FailureReport


@dataclass(frozen=True)
class RankEnd:
    """A rank that ended badly.

    Args:
        rank: over all nodes.
        node: the number of its node in the round.
        host: the node's name.
        code: its exit code, negative for a signal.
        first: whether it was among the first on its node to end so.
        report: what it wrote down, if it could.
        steps: optimizer steps that its heartbeat counted; None outside of a training.
        batch: the last batch that was done in its loop; None before the first one.
        phase: what it was doing, of `heartbeat_file.PHASES`; an error has ended its run where that is "end".
    """

    rank: int
    node: int
    host: str
    code: int
    first: bool
    report: FailureReport | None = None
    steps: int | None = None
    batch: int | None = None
    phase: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """Content of `failures/rank-<n>.json` for a rank that could not write it itself."""
        report = self.report
        return {
            "host": self.host,
            "step": self.steps if report is None else report.step,
            "batch": self.batch,
            "phase": self.phase,
            "how": self.how,
            "message": self.message or None,
            "traceback": None if report is None else report.traceback,
            "remote": report is not None and report.remote,
        }

    @property
    def title(self) -> str:
        """The rank, its host, and the number of steps it had done."""
        step = self.steps if self.report is None else self.report.step
        return f"rank {self.rank} (host {self.host}{'' if step is None else f', step {step}'})"

    @property
    def how(self) -> str:
        """Exit code or signal of the rank."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"{name} (if nobody sent it: out of memory)" if name == "SIGKILL" else name

    @property
    def message(self) -> str:
        """First line of the rank's report; empty if there is none."""
        return "" if self.report is None else self.report.message.partition("\n")[0]

    def as_json(self) -> dict[str, Any]:
        """Return a message for another agent, which does not print the traceback."""
        report = None if self.report is None else vars(replace(self.report, traceback=""))
        return {**vars(self), "report": report}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RankEnd:
        """Read a message that `as_json` made."""
        report = content["report"]
        return cls(**{**content, "report": None if report is None else FailureReport(**report)})


def find_cause(ends: Sequence[RankEnd], alarmed: int = 0) -> RankEnd | None:
    """Find the rank to blame: one that a signal ended first, else the first to report its own error, else any.

    A killed rank reports nothing, and the other ranks then report their broken connections.

    Args:
        ends: the ranks that ended badly, of all nodes.
        alarmed: the node that noticed first; clocks of two nodes cannot be compared.
    """
    near = sorted(ends, key=lambda end: (end.node != alarmed, end.rank))
    killed = [end for end in near if end.code < 0 and end.first and end.report is None]
    own = [end for end in near if end.report is not None and not end.report.remote]
    own.sort(key=lambda end: (end.node != alarmed, end.report.time_ns if end.report is not None else 0))
    first = [end for end in near if end.first and end.code != EXIT_PREEMPTED]
    rest = [end for end in near if end.code != EXIT_PREEMPTED]
    return next(iter((*killed, *own, *first, *rest)), None)


def job_code(first: list[int], last: list[int], killed: bool, early: bool = False) -> int:
    """Compute the job's exit code.

    Args:
        first: the codes seen when the first rank ended badly; empty when none did before the end was asked for.
        last: the codes of all ranks in the end; negative for a signal.
        killed: a rank did not end in its time and was killed.
        early: that first rank had started shortly before.
    """
    if EXIT_HUNG in first:  # a rank that reports a hang comes first, since it made the others end
        return EXIT_HUNG
    if early and not {-signal.SIGUSR1, -signal.SIGUSR2}.isdisjoint(first):
        return EXIT_PREEMPTED  # the rank had no handler for the announcing signal yet, so no training was lost
    if killed or any(code not in (0, EXIT_PREEMPTED) for code in (*first, *last)):
        return EXIT_FAILED
    return EXIT_PREEMPTED if EXIT_PREEMPTED in last else 0
