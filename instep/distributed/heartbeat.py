"""The heartbeat of this process, and the watchdog that ends the process if the ranks hang.

The training and evaluation loops write the step and the batch into the node's heartbeat file: two writes to mapped
memory per step. The watchdog is a thread that reads the numbers of all ranks on the node, a few times in
`hang_timeout_s`. In a hang it writes where this rank is, waits briefly for the reports of the other ranks, and ends the
process with code 76. A rank whose process is stopped cannot do so; the other ranks or the agent report it. If Python
cannot run because C code holds the GIL, `faulthandler`'s own thread writes the stacks; the watchdog resets this
thread's alarm about once per second.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from instep.errors import EXIT_HUNG, SettingError
from instep.health.error_report import AGENT_PID
from instep.health.heartbeat_file import (
    BATCH,
    COMPILES,
    HEARTBEAT_FILE,
    LIMIT_MS,
    PHASE,
    PHASES,
    PID,
    RANK,
    SAID,
    STEP,
    TURN,
    WAITS,
    HangDetector,
    HeartbeatFile,
)
from instep.state import PartialState, read_environment
from instep.state.messages import exchange
from instep.utils.untrusted_files import clean

__all__ = ["BATCH", "STEP", "Heartbeat", "heartbeat"]

_TOGETHER_S = 3.0  # seconds that a rank waits for the reports of the other ranks in a hang
_AT_ONCE_S = 5.0  # seconds after which the process ends even if writing the report hangs, as on a bad disk
_CALLS = 12
_COLLECTIVES = ("rank_records.py", "messages.py", "barriers.py", "collectives.py", "objects.py")
_RECORDS = 5
_PYTHON = os.path.dirname(os.__file__) + os.sep

# Functions of torch that dump recorded collectives: the first with NCCL only, the second since torch 2.11 with any
# backend.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def recorded() -> list[dict[str, Any]]:
    """Return torch's records of the latest collectives, the oldest first; an empty list if torch records none.

    This is safe in any thread, even while other threads wait for a device or another rank.
    """
    from torch._C import _distributed_c10d as c10d  # imported late: needed only in a hang

    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        if hasattr(c10d, name):
            entries += json.loads(getattr(c10d, name)(True, False)).get("entries", [])
    unique = {(entry["pg_id"], entry["record_id"], entry["profiling_name"]): entry for entry in entries}
    return sorted(unique.values(), key=lambda entry: entry["time_created_ns"])


def described(entry: dict[str, Any]) -> str:
    """Describe a recorded collective in words.

    Example:
        >>> described({"profiling_name": "gloo:all_reduce", "collective_seq_id": 7, "process_group": ["0", "default"],
        ...     "input_sizes": [[10]], "input_dtypes": ["Float"]})
        'gloo:all_reduce no. 7 of group default, Float[10]'
    """
    sizes = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    tensors = ", ".join(f"{dtype}{size}" for dtype, size in sizes)
    group = entry["process_group"][-1]
    return f"{entry['profiling_name']} no. {entry['collective_seq_id']} of group {group}, {tensors}"


class Heartbeat:
    """Heartbeat of this process: its slot in the node's heartbeat file. `heartbeat()` returns the object.

    Attributes:
        numbers: values of the slot. The loops write `numbers[STEP]` and `numbers[BATCH]`.
        hangs: whether the watchdog is about to end the process.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.hangs = False
        self._local_rank = PartialState().local_process_index
        path = os.environ.get(HEARTBEAT_FILE)
        self.by_agent = path is not None and os.environ.get(AGENT_PID) == str(os.getppid())
        self._use(HeartbeatFile(path) if path is not None and self.by_agent else None, self._local_rank)

    def _use(self, beats: HeartbeatFile | None, slot: int) -> None:
        self._beats, self._slot = beats, slot
        self._run_folder: Path | None = None
        self.numbers = memoryview(bytearray(128)).cast("q") if beats is None else beats.numbers(slot)
        self.numbers[BATCH] = -1
        self.numbers[RANK], self.numbers[PID] = PartialState().process_index, self.pid

    def enter(self, phase: str) -> None:
        """Begin a phase, one of `PHASES`. All ranks must call this at the same places of the program."""
        self.numbers[BATCH] = -1
        self.numbers[PHASE] = PHASES.index(phase)
        self.numbers[TURN] += 1

    def place(self) -> dict[str, Any]:
        """Return the step, batch (None if the loop has had no batch yet) and phase of this rank."""
        batch = self.numbers[BATCH]
        return {
            "step": self.numbers[STEP],
            "batch": batch if batch >= 0 else None,
            "phase": PHASES[self.numbers[PHASE]],
        }

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Enter a phase for a `with` block, and continue the outer phase afterwards.

        After an error the phase stays, so that reports show it. But a failed save need not end the run.
        """
        outer, batch = PHASES[self.numbers[PHASE]], self.numbers[BATCH]
        self.enter(phase)
        stays = phase != "save"
        try:
            yield
            stays = False
        finally:
            if not stays:
                self.enter(outer)
                self.numbers[BATCH] = batch

    @contextmanager
    def watched(self, timeout_s: float | None, folder: Path) -> Iterator[None]:
        """Watch this process and the others on its node for hangs, in a `with` block. Collective.

        Args:
            timeout_s: seconds without a step after which the ranks count as hung; None or infinity for no watching.
            folder: folder for the report of a hang, until `set_folder` sets another one.

        Raises:
            SettingError: ranks have different values of `timeout_s`.
        """
        process = PartialState()
        timeout_s = None if timeout_s == float("inf") else timeout_s
        offer = self._offer(timeout_s)
        try:
            mine = (timeout_s, process.node_index, offer, time.strftime("%Y%m%d-%H%M%S"))
            ranks = exchange(mine, process.control_group, "the heartbeat")
            if any(other[0] != timeout_s for other in ranks):
                given = ", ".join(f"rank {rank}: {other[0]}" for rank, other in enumerate(ranks))
                raise SettingError(f"hang_timeout_s differs between ranks: {given}", field="hang_timeout_s")
            if timeout_s is not None and self._beats is None:
                offers = [other[2] for other in ranks if other[1] == process.node_index]
                self._use(HeartbeatFile(next(path for path in offers if path is not None)), self._local_rank)
                process.wait_for_everyone("mapping the heartbeat file")
        finally:
            if offer is not None:
                os.unlink(offer)  # the system frees the file when all ranks, which have opened it, have ended
        if timeout_s is None:
            yield
            return
        self._name = f"hang-{ranks[0][3]}"
        self.set_folder(folder)
        self._run_folder = None  # the run folder is not known yet, since `folder` is only its parent
        self.enter("start")
        self.numbers[LIMIT_MS] = max(1, int(1000 * timeout_s))
        assert self._beats is not None
        from instep.distributed.stragglers import PaceWatch  # imported late: used only if hangs are watched for

        with ExitStack() as stack:
            stack.enter_context(closing(Watchdog(self, self._beats, self._slot, timeout_s)))
            if process.control_group is not None:
                host, folder_now = socket.gethostname(), lambda: self._run_folder
                stack.enter_context(closing(PaceWatch(self.numbers, process.control_group, host, folder_now)))
            stack.callback(self._leave)
            yield

    def end(self) -> None:
        """Record that an error ends this rank's run.

        The rank then counts as behind the others, since its cleanup may take long. If the watchdog has found a hang and
        is about to end the process, this does not return. An error at that time, such as a lost connection to another
        rank, comes from the hang and must not replace it in `status.json`.
        """
        found = self._beats is not None and any(beat.said for beat in self._beats.read())
        if self.hangs or (found and self.numbers[LIMIT_MS]):
            threading.Event().wait(2 * _AT_ONCE_S)
        self.numbers[BATCH], self.numbers[PHASE] = -1, PHASES.index("end")

    def _leave(self) -> None:
        self.numbers[LIMIT_MS] = 0
        # After an error, stay in the phase "end", since other ranks may wait for this process.
        if PHASES[self.numbers[PHASE]] != "end":
            self.enter("outside")

    def set_folder(self, folder: Path | None) -> None:
        """Set the run folder, in which the report of a hang is written."""
        if folder is not None and self._beats is not None and hasattr(self, "_name"):
            self._run_folder = folder.absolute()
            self._beats.set_folder(self._slot, str(self._run_folder / self._name))

    def _offer(self, timeout_s: float | None) -> str | None:
        """On the first rank of the node, create the heartbeat file of the node, if no agent has created one."""
        if timeout_s is None or self._beats is not None or self._local_rank:
            return None
        number, path = tempfile.mkstemp(prefix="instep-heartbeat-")
        os.close(number)
        HeartbeatFile.make(path, read_environment().local_world_size)
        return path


def _is_deep(path: str) -> bool:
    """Return True for a source file of torch, Python or instep's collectives, whose caller is shown in its place."""
    ours = os.path.basename(path) in _COLLECTIVES and f"{os.sep}instep{os.sep}" in path
    packages = f"{os.sep}site-packages{os.sep}"
    return ours or f"{packages}torch{os.sep}" in path or (path.startswith(_PYTHON) and packages not in path)


_one: Heartbeat | None = None


def heartbeat() -> Heartbeat:
    """Return this process's heartbeat."""
    global _one
    if _one is None or _one.pid != os.getpid():  # a forked child process needs its own heartbeat
        _one = Heartbeat()
    return _one


class Watchdog:
    """Thread that watches the ranks of this node for a hang, until `close`.

    Args:
        heart: heartbeat of this process.
        beats: heartbeat file of the node.
        slot: index of this process's slot in the file.
        timeout_s: seconds without a step after which the ranks count as hung.
    """

    def __init__(self, heart: Heartbeat, beats: HeartbeatFile, slot: int, timeout_s: float) -> None:
        # Imported late, since only a watchdog needs these modules. They are imported before the watching begins, since
        # a hanging process may be unable to import.
        from instep.distributed.stragglers import activity
        from instep.health import hang_report

        self._activity, self._reports = activity, hang_report
        self._heart, self._beats, self._slot, self._timeout_s = heart, beats, slot, timeout_s
        self._watched = threading.get_ident()
        self._poll_s = min(0.5, timeout_s / 10)
        self._alarm_s = -float("inf")
        self._hooks: tuple[Any, Any, Any] | None = None
        # With one rank on the node and no agent, no other process can read stacks in the heartbeat file: use stderr.
        self._own = beats.count > 1 or heart.by_agent
        self._out = os.dup(beats.fileno if self._own else 2)
        self._closed = threading.Event()
        self._note_compiler()
        self._set_alarm()  # set the alarm before the thread starts, since a step may hold the GIL forever
        self._thread = threading.Thread(target=self._run, name="instep-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        os.close(self._out)
        if self._hooks is not None:
            handler, start, end = self._hooks
            handler.remove_start_callback(start)
            handler.remove_end_callback(end)

    def _run(self) -> None:
        watch = HangDetector(self._beats)
        while not self._closed.wait(self._poll_s):
            self._note_compiler()
            # If one rank has found a hang, all ranks hang. The others report at once, before the end of the first rank
            # breaks their connections.
            if watch.detect() or any(beat.said for beat in self._beats.read()):
                self._end()
            self._set_alarm()

    def _set_alarm(self) -> None:
        now = time.monotonic()
        if now - self._alarm_s < min(1.0, self._timeout_s / 4):
            return
        self._alarm_s = now
        limit_s = self._timeout_s
        if self._own:  # stacks go to this rank's part of the heartbeat file, which is read only after a hang
            os.lseek(self._out, self._beats.stacks_at(self._slot), os.SEEK_SET)
        else:
            limit_s = self._beats.read()[self._slot].patience_s
        faulthandler.dump_traceback_later(min(limit_s, 1e6) + 1.0, file=self._out)

    def _note_compiler(self) -> None:
        """If torch's compiler is loaded, record when it compiles, since this may take longer than a step."""
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self._hooks is not None or handler is None:
            return
        numbers = self._heart.numbers

        def start(*_: Any) -> None:
            numbers[COMPILES] = 1

        def end(*_: Any) -> None:
            numbers[COMPILES] = 0

        handler.register_start_callback(start)
        handler.register_end_callback(end)
        self._hooks = handler, start, end

    def _end(self) -> None:
        self._heart.hangs = True
        faulthandler.dump_traceback_later(_AT_ONCE_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        frame = sys._current_frames().get(self._watched)
        calls = traceback.extract_stack(frame)[-_CALLS:]
        records: list[dict[str, Any]] = []
        # the format of torch's dump may change; then the report is written without collectives
        with suppress(Exception):
            records = recorded()
        near = next((call for call in reversed(calls) if not _is_deep(call.filename)), calls[-1] if calls else None)
        innermost = "not known" if near is None else f"{Path(near.filename).name}:{near.lineno} in {near.name}"
        last = f"; last collective {described(records[-1])}" if records else ""
        self._beats.set_where(self._slot, f"{innermost}{last}\n{''.join(traceback.format_list(calls))}")
        try:
            self._write(records)
        except OSError as error:
            text = f"instep: the report of rank {self._heart.numbers[RANK]} was not written: {error}\n"
            os.write(2, clean(text).encode())
        self._heart.numbers[WAITS] = self._activity(frame) == "wait"
        self._heart.numbers[SAID] = 1
        self._reports.wait_until_said(self._beats, _TOGETHER_S)
        if not self._heart.by_agent and self._first():
            os.write(2, clean(f"instep: {self._reports.report(self._beats)}\n").encode())
        os._exit(EXIT_HUNG)

    def _first(self) -> bool:
        """Return True if this rank writes the report of its node: the lowest rank that has written its own part."""
        return next(beat.local_rank for beat in self._beats.read() if beat.said) == self._slot

    def _write(self, records: list[dict[str, Any]]) -> None:
        beat = self._beats.read()[self._slot]
        folder = Path(self._beats.folder(self._slot))
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank-{beat.rank}.txt", "w") as file:
            file.write(f"rank {beat.rank} on {socket.gethostname()}, pid {beat.pid}, {time.strftime('%c')}\n")
            file.write(f"step {beat.step}, batch {beat.batch}, phase {beat.phase}\n")
            file.write("\nthe main thread, the innermost call last:\n")
            file.write(self._beats.where(self._slot).partition("\n")[2])
            file.write("\nlast collectives, the latest last:\n")
            file.writelines(f"  {described(entry)}\n" for entry in records[-_RECORDS:])
            file.write("\nall threads, the innermost call first:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if records:
            (folder / f"collectives-{beat.rank}.json").write_text(json.dumps(records, indent=1))
