"""Read how long the ranks of a run take for a step, from the file that rank 0 writes into the run folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.health.heartbeat_file import PACES_FILE
from instep.runs.status import own
from instep.utils.untrusted_files import LEASE_BYTES, clean, parse_object, read_regular


@dataclass(frozen=True)
class Paces:
    """Times of the busiest ranks in a run.

    Args:
        time_s: when the times were measured, in seconds since 1970; 0 if there are none.
        slow: ranks that make the other ranks wait.
        ranks: a tuple for each rank, the busiest first: rank, host, and the seconds of a whole step, of the rank's own
            work in a step, and of waiting for data in a step.
    """

    time_s: float = 0.0
    slow: list[int] = field(default_factory=list)
    ranks: list[tuple[Any, ...]] = field(default_factory=list)


def read_paces(folder: Path) -> Paces:
    """Read the times of the ranks from a run folder; empty if none can be read."""
    path = folder / PACES_FILE
    try:
        if not own(path, folder):
            return Paces()
        said = parse_object(read_regular(path, LEASE_BYTES))
        ranks = [
            (int(of["rank"]), clean(str(of["host"])), *(float(of[key]) for key in ("step_s", "work_s", "data_s")))
            for of in said["ranks"]
        ]
        return Paces(float(said["time"]), [int(rank) for rank in said["slow"]], ranks)
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return Paces()
