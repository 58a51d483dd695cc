"""`find_cause` finds the rank whose failure caused the failures of the others; `job_code` computes the exit code."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from instep.errors import EXIT_FAILED, EXIT_HUNG, EXIT_PREEMPTED
from instep.health.error_report import FailureReport


@dataclass(frozen=True)
class RankEnd:
    """End of a rank that failed.

    Args:
        rank: the rank, as numbered over all nodes.
        node: index of the rank's node in this round of the rendezvous.
        host: name of the node.
        code: exit code of the rank; negative: number of the signal that killed it.
        first: whether the rank was among the first on its node that failed.
        report: the report in the rank's error file; None if there is none.
        steps: number of optimizer steps in the rank's heartbeat; None if the rank was not training.
        batch: index of the last batch that was done in the loop; None if no batch was done.
        phase: what the rank was doing, one of `heartbeat_file.PHASES`; "end": an error had ended its run.
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
        """Return the content of `failures/rank-<n>.json` for a rank that could not write the file itself."""
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
        """Text with the rank, its host, and the number of steps that it had done."""
        step = self.steps if self.report is None else self.report.step
        return f"rank {self.rank} (host {self.host}{'' if step is None else f', step {step}'})"

    @property
    def how(self) -> str:
        """Text with the exit code or signal of the rank."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"{name} (if nobody sent it: out of memory)" if name == "SIGKILL" else name

    @property
    def message(self) -> str:
        """First line of the rank's report; empty if there is no report."""
        return "" if self.report is None else self.report.message.partition("\n")[0]

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for another agent, without the traceback, which that agent does not print."""
        report = None if self.report is None else vars(replace(self.report, traceback=""))
        return {**vars(self), "report": report}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RankEnd:
        """Return the `RankEnd` that another agent sent by `as_json`."""
        report = content["report"]
        return cls(**{**content, "report": None if report is None else FailureReport(**report)})


def find_cause(ends: Sequence[RankEnd], alarmed: int = 0) -> RankEnd | None:
    """Find the rank that caused the failure of the job.

    The cause is the first of these that exists: a rank that was among the first to fail and was killed by a signal; the
    rank that first reported an error of its own; any other failed rank. A killed rank writes no report, and the other
    ranks then report broken connections.

    Args:
        ends: ends of the failed ranks of all nodes.
        alarmed: number of the node that noticed a failure first. Its ranks come first, since the clocks of two nodes
            cannot be compared.
    """
    near = sorted(ends, key=lambda end: (end.node != alarmed, end.rank))
    killed = [end for end in near if end.code < 0 and end.first and end.report is None]
    own = [end for end in near if end.report is not None and not end.report.remote]
    own.sort(key=lambda end: (end.node != alarmed, end.report.time_ns if end.report is not None else 0))
    first = [end for end in near if end.first and end.code != EXIT_PREEMPTED]
    rest = [end for end in near if end.code != EXIT_PREEMPTED]
    return next(iter((*killed, *own, *first, *rest)), None)


def job_code(first: list[int], last: list[int], killed: bool, early: bool = False) -> int:
    """Compute the exit code of a job from the exit codes of its ranks, which are negative for signals.

    Args:
        first: exit codes at the moment when the first rank failed; empty if no rank failed before the job was asked
            to end.
        last: exit codes of all ranks at the end.
        killed: whether a rank did not end in time and was killed.
        early: whether the first rank that failed had started only shortly before its failure.
    """
    if EXIT_HUNG in first:  # checked first, since a rank that reports a hang makes the other ranks end
        return EXIT_HUNG
    if early and not {-signal.SIGUSR1, -signal.SIGUSR2}.isdisjoint(first):
        return EXIT_PREEMPTED  # the rank did not handle the signal that announces a preemption yet; nothing was lost
    if killed or any(code not in (0, EXIT_PREEMPTED) for code in (*first, *last)):
        return EXIT_FAILED
    return EXIT_PREEMPTED if EXIT_PREEMPTED in last else 0
