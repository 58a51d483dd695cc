"""Detection of stragglers, the ranks for which the others wait: the time that each rank works in a step is compared.

Ranks that train together all take the same time for a step, since the fast ones wait. So a thread checks twice a second
what the training thread is doing: waiting for other ranks (a backward pass counts as waiting, since it reduces
gradients), waiting for data, or working. The fraction of checks in which it is working, times the step's time, is the
rank's work time. Every 30 s each rank writes this time into torch's key-value store. Rank 0 reports ranks whose time
was far above that of the others twice in a row, and writes the latest times into the run folder for `instep dashboard`.
The training thread itself does none of this.

On a GPU the host's thread does not show what the device does, so only the time of waiting for data counts there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import TYPE_CHECKING

from instep.health.heartbeat_file import PACES_FILE, PHASE, PHASES, STEP, TURN
from instep.state import PartialState
from instep.state.rank_records import RankRecords
from instep.utils.atomic import replace
from instep.utils.untrusted_files import clean

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PERIOD_S = 0.5
SAMPLES = 60
"""Least number of checks in one measurement; the fraction of time for each activity is then known to about 0.06."""
APART = 0.25
"""A straggler is a rank that works longer than the median rank, by more than this fraction of a step's time."""

_KEPT = 256  # largest number of ranks in the file, so that programs that read only small files can read all of it
_WAITS = (
    f"{os.sep}torch{os.sep}distributed{os.sep}",
    f"{os.sep}torch{os.sep}autograd{os.sep}graph.py",
    "triggers.py",
    "rank_records.py",
)
_LOADS = (
    f"{os.sep}instep{os.sep}data{os.sep}",
    f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}",
    f"trainer{os.sep}loaders.py",
)
_TRAIN = PHASES.index("train")


@dataclass(frozen=True)
class Pace:
    """Mean times of one rank's training steps.

    Args:
        step_s: seconds per step.
        work_s: seconds per step in which the rank works.
        data_s: seconds per step in which the rank waits for data.
        host: host name of the rank's machine.
    """

    step_s: float
    work_s: float
    data_s: float
    host: str

    @property
    def busy_s(self) -> float:
        """Seconds of work in a step for which the other ranks may have to wait."""
        return self.work_s + self.data_s


def activity(frame: FrameType | None) -> str:
    """Return what a thread is doing, from its stack frame: "wait" (for ranks), "data" (waiting for data) or "work"."""
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in _WAITS):
            return "wait"
        if any(part in path for part in _LOADS):
            return "data"
        frame = frame.f_back
    return "work"


def find_stragglers(paces: Mapping[int, Pace]) -> list[int]:
    """Return the ranks that work much longer in a step than the median rank.

    Example:
        >>> find_stragglers({rank: Pace(0.4, 0.3 if rank == 2 else 0.1, 0.0, "a") for rank in range(4)})
        [2]
    """
    if len(paces) < 2:
        return []
    usual_s = median_low(pace.busy_s for pace in paces.values())
    step_s = median_low(pace.step_s for pace in paces.values())
    return [rank for rank, pace in paces.items() if pace.busy_s - usual_s > APART * step_s]


class PaceWatch:
    """Thread that measures and compares the step times of the ranks, until `close`.

    Args:
        numbers: this process's slot in the heartbeat file.
        group: the control group.
        host: host name of this machine.
        folder: function that returns the run folder, which is chosen later; its result is None if there is none.
    """

    def __init__(self, numbers: memoryview, group: ProcessGroup, host: str, folder: Callable[[], Path | None]) -> None:
        self._numbers, self._group, self._host, self._folder = numbers, group, host, folder
        self._on_cpu = PartialState().device.type == "cpu"
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep-pace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the measuring thread."""
        self._closed.set()
        self._thread.join(PERIOD_S + 1.0)  # wait with a time limit, since the key-value store may not answer

    def _run(self) -> None:
        records = RankRecords("pace", self._group)
        before: list[int] = []
        reported: set[int] = set()
        turn = 0
        while (pace := self._measure()) is not None:
            try:
                records.write(turn, json.dumps(asdict(pace)))
                if self._group.rank() == 0 and turn:
                    told = records.read(turn - 1, or_later=True).items()
                    paces = {rank: Pace(**json.loads(text)) for rank, text in told}
                    slow = find_stragglers(paces)
                    for rank in slow:
                        if rank in before and rank not in reported:
                            self._say(rank, paces)
                    self._keep(paces, slow)
                    reported = reported.intersection(slow) | set(before).intersection(slow)
                    before = slow
            except RuntimeError:  # the process that hosts the key-value store has ended
                return
            turn += 1

    def _measure(self) -> Pace | None:
        """Measure this rank's step times over at least `SAMPLES` checks of the thread; return None after `close`."""
        seen = {"wait": 0, "data": 0, "work": 0}
        steps, seconds, turn = 0, 0.0, -1
        step, at = self._numbers[STEP], time.monotonic()
        while sum(seen.values()) < SAMPLES or not steps:
            if self._closed.wait(PERIOD_S):
                return None
            now = time.monotonic()
            if self._numbers[PHASE] == _TRAIN and self._numbers[TURN] == turn:
                steps += self._numbers[STEP] - step
                seconds += now - at
                seen[activity(sys._current_frames().get(self._watched))] += 1
            step, at, turn = self._numbers[STEP], now, self._numbers[TURN]
        samples = sum(seen.values())
        step_s = seconds / steps
        work_s = step_s * seen["work"] / samples if self._on_cpu else 0.0
        return Pace(step_s, work_s, step_s * seen["data"] / samples, self._host)

    def _keep(self, paces: Mapping[int, Pace], slow: list[int]) -> None:
        """Write the step times of the busiest ranks into the run folder."""
        folder = self._folder()
        if folder is None:
            return
        busiest = sorted(paces, key=lambda rank: paces[rank].busy_s, reverse=True)[:_KEPT]
        ranks = [{"rank": rank, **asdict(paces[rank])} for rank in busiest]
        content = {"time": time.time(), "step": self._numbers[STEP], "slow": slow[:_KEPT], "ranks": ranks}
        with suppress(OSError):  # a full or bad disk must not end the training
            replace(folder / PACES_FILE, json.dumps(content).encode())

    def _say(self, rank: int, paces: Mapping[int, Pace]) -> None:
        slow = paces[rank]
        usual_s = median_low(pace.busy_s for pace in paces.values())
        data = f", {slow.data_s:.3g} s of that waiting for data" if slow.data_s > slow.work_s / 4 else ""
        text = (
            f"rank {rank} on {slow.host} is slow: in a step of {slow.step_s:.3g} s it works {slow.busy_s:.3g} s{data}, "
            f"and the others {usual_s:.3g} s; they wait for it."
        )
        os.write(2, clean(f"instep: {text}\n").encode())
