"""Report of a hang on one node: which ranks do not respond, and where in the code the other ranks wait.

The node's agent writes the report; if there is no agent, a rank writes it.
"""

from __future__ import annotations

import json
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.errors import EXIT_HUNG
from instep.health.heartbeat_file import HEARTBEAT_FILE, HangDetector, HeartbeatFile, RankProgress, folder_of
from instep.health.run_status import NAME, end_status, leave_failure, read_status, why_of
from instep.state.rank_records import ENDED_FILE, named_ranks
from instep.utils.atomic import replace
from instep.utils.process_id import state_of

_TO_SAY_S = 10.0  # seconds that ranks have to write their own reports; enough for a busy rank that can run
_TO_WRITE_S = 5.0
_TO_END_S = 1.0
_POLL_S = 0.05
_STATES = {
    "T": "stopped by a signal (SIGCONT continues it)",
    "t": "stopped by a debugger",
    "D": "waiting for a disk or a driver",
    "R": "running code that Python cannot interrupt",
    "S": "waiting in code that Python cannot interrupt",
}
_ENDED = ("Z", "X", "")
_SILENT = ("T", "t", *_ENDED)
_NCCL_DUMP = "nccl_trace_rank_"


class NodeWatch:
    """Watches the heartbeats of a node's ranks in the agent: makes the heartbeat file, and detects a hang.

    Args:
        folder: folder for the heartbeat file and for the dumps of NCCL's flight recorder.
        count: number of ranks on this node.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self.beats = HeartbeatFile.make(folder / "heartbeats", count)

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables for the ranks: the paths of two files, and settings of torch's flight recorder.

        Args:
            given: variables that are set already, and are not changed.
        """
        recorder = {
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": str(self._folder / _NCCL_DUMP),
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        }
        return {
            HEARTBEAT_FILE: str(self._folder / "heartbeats"),
            ENDED_FILE: str(self._folder / "ended"),
            **{name: value for name, value in recorder.items() if name not in given},
        }

    def reset(self) -> None:
        """Clear the heartbeats before new ranks start."""
        self.beats.clear()
        self._watch = HangDetector(self.beats)
        self._ended: dict[int, int] = {}
        (self._folder / "ended").unlink(missing_ok=True)

    def note_ends(self, codes: Mapping[int, int | None]) -> None:
        """Tell the running ranks which ranks have ended, and so cannot take part in a collective.

        Args:
            codes: exit code of each rank of this node, by local rank; None while the rank runs.
        """
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if ended != self._ended:
            # the disk is full: the next call tries again, and the agent finds the cause without this file too
            with suppress(OSError):
                replace(self._folder / "ended", json.dumps(ended).encode())
                self._ended = ended

    def hangs(self, says_so: bool) -> bool:
        """Return True if the ranks hang.

        Args:
            says_so: whether a rank ended with the exit code for a hang.
        """
        return self._watch.detect() or (says_so and any(beat.said for beat in self.beats.read()))

    def report(self) -> str:
        """Wait for the reports that the ranks write, write the report of this node, and return a short form of it."""
        wait_until_said(self.beats, _TO_SAY_S)
        text = report(self.beats, self._folder)
        _wait(lambda: all(not beat.said or state_of(beat.pid) in _ENDED for beat in self.beats.read()), _TO_END_S)
        return text


def wait_until_said(beats: HeartbeatFile, seconds: float) -> None:
    """Wait until each rank that can run has written its own report, at most for a number of seconds."""
    _wait(lambda: all(_is_settled(beats, beat) for beat in beats.read()), seconds)


def _is_settled(beats: HeartbeatFile, beat: RankProgress) -> bool:
    return beat.said or state_of(beat.pid) in _SILENT or _is_held(beats, beat)


def report(beats: HeartbeatFile, nccl_dumps: Path | None = None) -> str:
    """Write the report of this node, and return a short form of it.

    The hang may be due to the disk. So if the report is not written within a few seconds, the short form says so.

    Args:
        beats: heartbeat file of the node.
        nccl_dumps: folder with the dumps of NCCL's flight recorder.

    Returns:
        Short form of the report, as text for people.
    """
    found = beats.read()
    folder = folder_of(beats)
    text = _text(beats, found)
    if folder is None:
        return text
    problem = in_time(lambda: _write(beats, found, folder, text, nccl_dumps))
    return f"{text}\nStacks of all threads: {folder}" + (f" (it could not be written: {problem})" if problem else "")


def _text(beats: HeartbeatFile, found: list[RankProgress]) -> str:
    begun = [beat for beat in found if beat.pid]
    limit = max((beat.limit_s for beat in begun), default=0.0)
    lines = [f"hang on {socket.gethostname()}: no step for {limit:g} s. {_who(beats, begun)}"]
    lines.append(f"  {'rank':>5}  {'pid':>8}  {'step':>8}  {'batch':>6}  {'phase':8}  where")
    for beat in begun:
        where = beats.where(beat.local_rank).partition("\n")[0] if beat.said else f"did not answer: {_state(beat)}"
        batch = str(beat.batch) if beat.batch >= 0 else "-"
        lines.append(f"  {beat.rank:>5}  {beat.pid:>8}  {beat.step:>8}  {batch:>6}  {_phase(beat):8}  {where}")
    groups: dict[str, list[int]] = {}
    for beat in begun:
        if beat.said:
            groups.setdefault(beats.where(beat.local_rank).partition("\n")[2], []).append(beat.rank)
    for stack, ranks in groups.items():
        lines += [f"{named_ranks(ranks)} (main thread, the innermost call last):", stack.rstrip()]
    return "\n".join(lines)


def _who(beats: HeartbeatFile, begun: list[RankProgress]) -> str:
    """Return a text about the ranks that the others wait for, with their phase and place in the code."""
    stopped = [beat for beat in begun if not beat.said and _is_held(beats, beat)]
    if stopped:
        each = "; ".join(f"rank {beat.rank} (pid {beat.pid}) is {_state(beat)}" for beat in stopped)
        first = min(stopped, key=lambda beat: beat.step)
        return f"{each}. It was at step {first.step}, phase {_phase(first)}."
    # A rank may have ended or become silent because of the hang, so a rank that runs and does not wait is named first.
    busy = [beat for beat in begun if beat.said and not beat.waits]
    silent = [beat for beat in begun if not beat.said]
    waiting = [beat for beat in begun if beat.said and beat.waits]
    suspects = _last(busy) or silent
    if not suspects and len(waiting) > 1:
        return _who_waits(beats, waiting)
    return f"{'; '.join(_at(beats, beat) for beat in suspects or waiting)}."


def _who_waits(beats: HeartbeatFile, waiting: list[RankProgress]) -> str:
    """Return a text about the ranks that wait at another place in the code than most of the ranks do.

    It does not name the ranks that are behind, since these may be the majority.
    """
    places: dict[tuple[str, str], list[RankProgress]] = {}
    for beat in waiting:
        place = beats.where(beat.local_rank).partition("\n")[0].partition("; last collective")[0]
        places.setdefault((_phase(beat), place), []).append(beat)
    by_size = sorted(places.values(), key=lambda found: (len(found), found[0].position))
    if len(by_size) == 1:
        return (
            f"All ranks of this node wait for another node, or for each other, at one place: {_at(beats, waiting[0])}."
        )
    most = by_size[-1]
    if len(by_size[-2]) == len(most):  # it is unknown which of two equally large groups of ranks is wrong
        each = "; ".join(_at(beats, found[0]) for found in by_size)
        return f"The ranks wait for each other in different places: {each}. All must make the same calls in one order."
    each = "; ".join(_at(beats, beat) for found in by_size[:-1] for beat in found)
    others = _at(beats, most[0], named_ranks([beat.rank for beat in most]))
    return (
        f"{each}: it waits there for the others, which wait elsewhere: {others}. All must make the same calls in order."
    )


def _last(found: list[RankProgress]) -> list[RankProgress]:
    """Return the ranks that are behind the others in the program."""
    last = min((beat.position for beat in found), default=None)
    return [beat for beat in found if beat.position == last]


def _at(beats: HeartbeatFile, beat: RankProgress, who: str = "") -> str:
    who, verb = who or f"rank {beat.rank} (pid {beat.pid})", "hang" if who.startswith("ranks") else "hangs"
    if not beat.said:
        return f"{who} is {_state(beat)}, at step {beat.step}, phase {_phase(beat)}"
    where = beats.where(beat.local_rank).partition("\n")[0]
    return f"{who} {verb} at step {beat.step}, phase {_phase(beat)}, in {where}"


def _phase(beat: RankProgress) -> str:
    return "compile" if beat.compiles else beat.phase


def _is_held(beats: HeartbeatFile, beat: RankProgress) -> bool:
    """Return True if a rank cannot run Python code; then only `faulthandler` can have written its stacks."""
    state = state_of(beat.pid)
    return state in ("T", "t", "D") or (state in ("R", "S") and bool(beats.stacks(beat.local_rank)))


def _state(beat: RankProgress) -> str:
    if beat.left and state_of(beat.pid) not in _SILENT:
        return "out of its run after an error, and has not ended"
    return _STATES.get(state_of(beat.pid), "gone")


def _write(beats: HeartbeatFile, found: list[RankProgress], folder: Path, text: str, nccl_dumps: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for beat in found:
        if beat.pid and not beat.said:
            about = f"rank {beat.rank} on {socket.gethostname()}, pid {beat.pid}, is {_state(beat)}\n"
            about += f"step {beat.step}, batch {beat.batch}, phase {beat.phase}\n\n"
            about += beats.stacks(beat.local_rank) or "It could not write its stacks.\n"
            (folder / f"rank-{beat.rank}.txt").write_text(about)
    first = min((beat.rank for beat in found if beat.pid), default=0)
    (folder / f"node-of-rank-{first}.txt").write_text(f"{text}\n")
    for dump in sorted(nccl_dumps.glob(f"{_NCCL_DUMP}*")) if nccl_dumps is not None else ():
        shutil.copy(dump, folder / dump.name)
    for beat in found if (folder.parent / NAME).is_file() else ():
        if beat.pid:
            leave_failure(folder.parent, beat.rank, _facts(beats, beat))
    content = read_status(folder.parent)
    if content is not None:
        error = f"{text.splitlines()[0]} See {folder}."
        content |= {
            "status": "hung",
            "exit_code": EXIT_HUNG,
            "error": error,
            "ended": time.time(),
            **why_of(content, error),
        }
        content["global_step"] = max(beat.step for beat in found)
        end_status(folder.parent, content)


def _facts(beats: HeartbeatFile, beat: RankProgress) -> dict[str, Any]:
    """Return the content of `failures/rank-<n>.json` for a rank in a hang: where it was, and if it waited."""
    where, _, stack = beats.where(beat.local_rank).partition("\n")
    return {
        "host": socket.gethostname(),
        "pid": beat.pid,
        "step": beat.step,
        "batch": beat.batch if beat.batch >= 0 else None,
        "phase": _phase(beat),
        "how": "hang",
        "message": where if beat.said else f"did not answer: {_state(beat)}",
        "traceback": stack if beat.said else beats.stacks(beat.local_rank) or None,
        "remote": beat.waits,
    }


def _wait(there: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(_POLL_S)


def in_time(work: Callable[[], None]) -> str:
    """Run a function in a thread with a time limit; return why it failed, or "" if it succeeded."""
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run() -> None:
        problem = ""
        try:
            work()
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems.put(problem)

    threading.Thread(target=run, name="instep-report", daemon=True).start()
    try:
        return problems.get(timeout=_TO_WRITE_S)
    except queue.Empty:
        return f"the disk did not answer within {_TO_WRITE_S:g} s"
