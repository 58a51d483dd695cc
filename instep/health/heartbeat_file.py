"""The heartbeats of a node's ranks: one memory-mapped file. Each rank writes its own part, and all on the node read it.

The elastic agent makes the file and names it in INSTEP_HEARTBEAT_FILE. For each local rank it has a slot of numbers,
two texts, and room for the stacks that `faulthandler` writes when Python cannot run. A rank writes its numbers without
a system call, and they stay readable after it is stopped or killed.
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
"""Of a run folder: how long each rank works in a step, as it was last measured."""
SLOW = 10
"""What is no step of a loop may take so many times the limit: starting, loading, saving, compiling, an epoch's end."""

PHASES = ("outside", "start", "load", "train", "validate", "test", "predict", "save", "epoch", "end")
LOOPS = ("train", "validate", "test", "predict")
BATCH, STEP, TURN, PHASE, COMPILES, RANK, PID, LIMIT_MS, SAID, WAITS = range(10)

_NUMBERS = struct.Struct("16q")
_FOLDER, _WHERE, _SLOT = _NUMBERS.size, 1024, 8192
_STACKS = 1 << 20
_GAP_S = 2.0


@dataclass(frozen=True)
class RankProgress:
    """The numbers in a rank's slot, which say how far the rank has come.

    Args:
        batch: the last batch of the loop that was done; -1: none yet.
        step: optimizer steps.
        turn: how often the phase changed.
        phase: one of `PHASES`.
        compiles: whether it waits for the compiler.
        rank: over all nodes.
        pid: 0 where the rank has not begun.
        limit_s: seconds that a step may take; 0: nobody watches.
        said: whether it has written its own report of a hang.
        local_rank: on this node.
        waits: whether, by its own report, it waited for other ranks.
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
        """The rank's position in the program; the rank that is behind has the smallest position."""
        return self.turn, self.step, self.batch

    @property
    def left(self) -> bool:
        """Whether an error has ended the rank's run while its process is still alive."""
        return self.phase == "end" and not self.limit_s

    @property
    def patience_s(self) -> float:
        """Seconds for which the rank may make no progress; infinity if nobody watches."""
        if not self.limit_s:
            return float("inf")
        steps = self.phase in LOOPS and self.batch >= 0 and not self.compiles
        return self.limit_s if steps else self.limit_s * SLOW


class HeartbeatFile:
    """The heartbeat file of a node's ranks.

    Args:
        path: of a file that `make` made.

    Attributes:
        fileno: of the open file, for `faulthandler` to write to.
        count: how many ranks it is for.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.fileno = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self.fileno)
        self.count = os.fstat(self.fileno).st_size // (_SLOT + _STACKS)
        self._map = mmap.mmap(self.fileno, self.count * _SLOT)

    @staticmethod
    def make(path: str | os.PathLike[str], count: int) -> HeartbeatFile:
        """Make a file for a number of ranks; it takes no space on the disk before it is written to."""
        with open(path, "wb") as file:
            file.truncate(count * (_SLOT + _STACKS))
        return HeartbeatFile(path)

    def clear(self) -> None:
        """Clear all slots, since new ranks start."""
        self._map[:] = bytes(len(self._map))
        for local_rank in range(self.count):
            os.pwrite(self.fileno, b"\0", self.stacks_at(local_rank))

    def numbers(self, local_rank: int) -> memoryview:
        """Return the numbers of a rank. The rank itself sets them: `numbers[STEP] = 3`."""
        start = local_rank * _SLOT
        return memoryview(self._map)[start : start + _NUMBERS.size].cast("q")

    def read(self) -> list[RankProgress]:
        """Read every rank's slot, by local rank."""
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
        """Set the folder for reports of a hang."""
        self._set(local_rank, _FOLDER, _WHERE, folder)

    def folder(self, local_rank: int) -> str:
        """Read the folder for reports of a hang; empty before it is known."""
        return self._get(local_rank, _FOLDER, _WHERE)

    def set_where(self, local_rank: int, text: str) -> None:
        """Write where the rank's main thread is during a hang: a line, then the calls, the innermost last."""
        self._set(local_rank, _WHERE, _SLOT, text)

    def where(self, local_rank: int) -> str:
        """Read what `set_where` has written."""
        return self._get(local_rank, _WHERE, _SLOT)

    def stacks_at(self, local_rank: int) -> int:
        """Return the offset in bytes of the stacks that `faulthandler` writes for a rank."""
        return self.count * _SLOT + local_rank * _STACKS

    def stacks(self, local_rank: int) -> str:
        """Read the stacks that `faulthandler` wrote, if there are any."""
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
    """Detector of a hang of a node's ranks.

    Ranks wait for each other, so a rank without progress may only be waiting. The ranks that are behind all others on
    this node wait for no rank of this node. If each of them made no progress for longer than its limit, it is a hang.

    Args:
        beats: the node's.
    """

    def __init__(self, beats: HeartbeatFile) -> None:
        self._beats = beats
        self._seen: list[RankProgress | None] = [None] * beats.count
        self._still_s = [0.0] * beats.count
        self._looked = time.monotonic()

    def detect(self) -> bool:
        """Read the slots again, and return whether the ranks hang."""
        now = time.monotonic()
        # The watching process itself may have been stopped or starved; such a gap in its looks counts only up to
        # `_GAP_S`.
        passed_s, self._looked = min(now - self._looked, _GAP_S), now
        beats = self._beats.read()
        for i, beat in enumerate(beats):
            self._still_s[i] = self._still_s[i] + passed_s if beat == self._seen[i] else 0.0
            self._seen[i] = beat
        last = min(beat.position for beat in beats)
        # A rank that left its run holds up the ranks still in theirs, since they learn of it only when its process
        # ends.
        end_s = SLOW * max(beat.limit_s for beat in beats) or float("inf")
        return all(
            self._still_s[i] > (end_s if beat.left else beat.patience_s)
            for i, beat in enumerate(beats)
            if beat.position == last
        )


def folder_of(beats: HeartbeatFile) -> Path | None:
    """Find the folder of this node's reports; None if no rank has set one yet."""
    return next((Path(text) for i in range(beats.count) if (text := beats.folder(i))), None)
