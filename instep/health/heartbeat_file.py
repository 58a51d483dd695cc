"""`HeartbeatFile`: one memory-mapped file per node, in which each rank writes how far it has come.

The elastic agent creates the file and sets its path as INSTEP_HEARTBEAT_FILE; all processes on the node can read it.
For each local rank the file has a slot with numbers, two texts, and space for the stacks that `faulthandler` writes
when Python cannot run. A rank writes its numbers without a system call, and they stay readable after the rank was
stopped or killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_FILE = "INSTEP_HEARTBEAT_FILE"
PACES_FILE = "paces.json"
"""File in the run folder with the time that each rank works in a step, as it was measured last."""
SLOW = 10
"""Work other than steps may take this many times a step's limit: starting, loading, saving, compiling, epoch ends."""

PHASES = ("outside", "start", "load", "train", "validate", "test", "predict", "save", "epoch", "end")
LOOPS = ("train", "validate", "test", "predict")
BATCH, STEP, TURN, PHASE, COMPILES, RANK, PID, LIMIT_MS, SAID, WAITS = range(10)

_NUMBERS = struct.Struct("16q")
_FOLDER, _WHERE, _SLOT = _NUMBERS.size, 1024, 8192
_STACKS = 1 << 20
_GAP_S = 2.0


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank: the numbers in its slot of the heartbeat file.

    Args:
        batch: index of the last batch that was done in the loop; -1: no batch is done yet.
        step: number of optimizer steps that are done.
        turn: how often the phase has changed.
        phase: what the rank is doing, one of `PHASES`.
        compiles: whether the rank waits for the compiler.
        rank: the rank, as numbered over all nodes.
        pid: process id of the rank; 0: the rank has not started yet.
        limit_s: seconds that a step may take; 0: there is no limit.
        said: whether the rank has written its own report of a hang.
        local_rank: the rank, as numbered on this node.
        waits: whether the rank's own report says that it waited for other ranks.
    """

    batch: int
    step: int
    turn: int
    phase: str
    compiles: bool
    rank: int
    pid: int
    limit_s: float
    said: bool
    local_rank: int
    waits: bool = False

    @property
    def position(self) -> tuple[int, int, int]:
        """Position of the rank in the program; the rank that is farthest behind has the smallest position."""
        return self.turn, self.step, self.batch

    @property
    def left(self) -> bool:
        """Whether the run of the rank has ended with an error while its process is still alive."""
        return self.phase == "end" and not self.limit_s

    @property
    def patience_s(self) -> float:
        """Seconds that the rank may be without progress; infinity if there is no limit."""
        if not self.limit_s:
            return float("inf")
        steps = self.phase in LOOPS and self.batch >= 0 and not self.compiles
        return self.limit_s if steps else self.limit_s * SLOW


class HeartbeatFile:
    """Heartbeat file of the ranks on a node.

    Args:
        path: path of a file that `make` has created.

    Attributes:
        fileno: file descriptor of the open file, to which `faulthandler` writes.
        count: number of ranks that the file has slots for.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.fileno = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self.fileno)
        self.count = os.fstat(self.fileno).st_size // (_SLOT + _STACKS)
        self._map = mmap.mmap(self.fileno, self.count * _SLOT)

    @staticmethod
    def make(path: str | os.PathLike[str], count: int) -> HeartbeatFile:
        """Create a file with slots for a number of ranks; a slot takes no disk space until a rank writes to it."""
        with open(path, "wb") as file:
            file.truncate(count * (_SLOT + _STACKS))
        return HeartbeatFile(path)

    def clear(self) -> None:
        """Clear all slots, before new ranks start."""
        self._map[:] = bytes(len(self._map))
        for local_rank in range(self.count):
            os.pwrite(self.fileno, b"\0", self.stacks_at(local_rank))

    def numbers(self, local_rank: int) -> memoryview:
        """Return the numbers in the slot of a rank, which the rank itself sets: `numbers[STEP] = 3`."""
        start = local_rank * _SLOT
        return memoryview(self._map)[start : start + _NUMBERS.size].cast("q")

    def read(self) -> list[RankProgress]:
        """Read the slots of all ranks, in the order of local ranks."""
        beats = []
        for local_rank in range(self.count):
            batch, step, turn, phase, compiles, rank, pid, limit_ms, said, waits, *_ = _NUMBERS.unpack_from(
                self._map, local_rank * _SLOT
            )
            beats.append(
                RankProgress(
                    batch,
                    step,
                    turn,
                    PHASES[phase],
                    bool(compiles),
                    rank,
                    pid,
                    limit_ms / 1000,
                    bool(said),
                    local_rank,
                    bool(waits),
                )
            )
        return beats

    def set_folder(self, local_rank: int, folder: str) -> None:
        """Write the path of the folder for reports of a hang into the slot of a rank."""
        self._set(local_rank, _FOLDER, _WHERE, folder)

    def folder(self, local_rank: int) -> str:
        """Read the path of the folder for reports of a hang; empty if the rank has not written it yet."""
        return self._get(local_rank, _FOLDER, _WHERE)

    def set_where(self, local_rank: int, text: str) -> None:
        """Write where a rank's main thread is during a hang: a line of text, then the calls, the innermost last."""
        self._set(local_rank, _WHERE, _SLOT, text)

    def where(self, local_rank: int) -> str:
        """Read the text that `set_where` has written."""
        return self._get(local_rank, _WHERE, _SLOT)

    def stacks_at(self, local_rank: int) -> int:
        """Return the offset in bytes at which `faulthandler` writes the stacks of a rank."""
        return self.count * _SLOT + local_rank * _STACKS

    def stacks(self, local_rank: int) -> str:
        """Read the stacks of a rank that `faulthandler` has written; empty if there are none."""
        text = os.pread(self.fileno, _STACKS, self.stacks_at(local_rank))
        return text[: text.index(0) if 0 in text else None].decode(errors="replace")

    def _set(self, local_rank: int, start: int, end: int, text: str) -> None:
        data = text.encode()[: end - start - 1]
        at = local_rank * _SLOT + start
        self._map[at : at + len(data) + 1] = data + b"\0"

    def _get(self, local_rank: int, start: int, end: int) -> str:
        at = local_rank * _SLOT
        return self._map[at + start : at + end].partition(b"\0")[0].decode(errors="replace")


class HangDetector:
    """Detects a hang of the ranks on a node.

    Ranks wait for each other, so a rank without progress may only be waiting. But the ranks that are farthest behind
    wait for no other rank of the node. If all of these are without progress for longer than their limits, the ranks
    hang.

    Args:
        beats: heartbeat file of the node.
    """

    def __init__(self, beats: HeartbeatFile) -> None:
        self._beats = beats
        self._seen: list[RankProgress | None] = [None] * beats.count
        self._still_s = [0.0] * beats.count
        self._looked = time.monotonic()

    def detect(self) -> bool:
        """Read the slots again, and return True if the ranks hang."""
        now = time.monotonic()
        # This process itself may have been stopped, or may have got no CPU time. So the time since the last call counts
        # only up to `_GAP_S`.
        passed_s, self._looked = min(now - self._looked, _GAP_S), now
        beats = self._beats.read()
        for i, beat in enumerate(beats):
            self._still_s[i] = self._still_s[i] + passed_s if beat == self._seen[i] else 0.0
            self._seen[i] = beat
        last = min(beat.position for beat in beats)
        # The other ranks wait for a rank whose run has ended with an error, since they learn of the error only when its
        # process ends.
        end_s = SLOW * max(beat.limit_s for beat in beats) or float("inf")
        return all(
            self._still_s[i] > (end_s if beat.left else beat.patience_s)
            for i, beat in enumerate(beats)
            if beat.position == last
        )


def folder_of(beats: HeartbeatFile) -> Path | None:
    """Return the folder for the reports of this node; None if no rank has written it yet."""
    return next((Path(text) for i in range(beats.count) if (text := beats.folder(i))), None)
