"""`Lease`: lets only one run at a time save into a folder of checkpoints, by a lease file with a fencing number.

A lease is a file `.lease-<8 digits>`; the file with the highest number is valid. A run takes a folder by creating the
file with the next number, which succeeds for only one of several processes. A thread of the holder increases a counter
in the file at regular intervals. Another process that wants the folder must find out whether the holder is alive. On
the same host it asks the operating system. If the holder is on another host, it watches the counter for three intervals
on its own monotonic clock. The clocks of two hosts are never compared. After a restart, a job takes over the folder
that it held before, without waiting.

- The file with the highest number is never removed, only marked as released. So no number is used twice, and a process
  that was suspended for hours finds a higher number and does not write.
- `check` is called right before every commit and deletion. If a process is suspended between `check` and the rename
  that commits, and another run takes the folder meanwhile, the rename fails: the new holder has removed the folder of
  the unfinished save.
- If a renewal of the counter fails, the next renewal repeats it. After three failures in a row, a line on stderr says
  so. The thread is a daemon thread, which does not keep the process alive.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from instep.checkpoint.files import Files, LocalFiles
from instep.errors import CheckpointError, FolderInUseError, LeaseLostError
from instep.state.environment import read_job
from instep.utils.process_id import is_gone, this_process
from instep.utils.redact import hide_arguments
from instep.utils.untrusted_files import LEASE_BYTES, parse_json

INTERVAL_S = 5.0
SEEN_S = 10.0
_WATCHED = 3  # a holder on another host counts as dead if it misses this number of renewals
_NAME = re.compile(r"\.lease-([0-9]{8,18})")
_LONG = 300
# Largest valid values in a lease file. A process waits for three intervals, so an interval must be short.
_MOST = {"pid": 2**31, "counter": 2**63, "interval_s": 60.0}
_held: dict[str, Lease] = {}  # leases that this process holds, by their id


class Lease:
    """The right of one run to save into a folder of checkpoints. Use `Lease.take` to get one.

    Args:
        root: folder of the checkpoints.
        number: fencing number: the number in the name of the lease file.
        files: file operations of the folder's file system.
        run_id: id of the run that holds the lease.
        interval_s: seconds between two renewals of the lease.
    """

    def __init__(self, root: Path, number: int, files: Files, run_id: str, interval_s: float) -> None:
        self.root, self.number, self.run_id = root, number, run_id
        self.path = root / f".lease-{number:08d}"
        self._files, self._interval_s = files, interval_s
        self._id, self._owner = uuid.uuid4().hex, this_process()
        self._since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._users, self._counter = 1, 0
        self.serial: int | None = None  # serial number of the folder's last save; None: not known yet
        self.before: str | None = None  # run that held the folder before this one
        self._writing = threading.Lock()
        self._stop = threading.Event()

    @classmethod
    def take(cls, root: Path, run_id: str, files: Files | None = None, *, interval_s: float = INTERVAL_S) -> Lease:
        """Take the lease of a folder, and create the folder if it does not exist.

        The same run may take the lease again in the same process. If the lease belongs to a process on another host,
        this method waits for up to three of that process's intervals, and says so on stderr.

        Args:
            root: folder of the checkpoints.
            run_id: id of the run.
            files: file operations of the folder's file system. None: those of the local disk.
            interval_s: seconds between two renewals of the lease.

        Raises:
            FolderInUseError: another run holds the folder.
            CheckpointError: the folder cannot be written to.
        """
        files = files if files is not None else LocalFiles()
        try:
            files.make_root(root)
            while True:
                before = _highest(root, files)
                if before is not None:
                    ours = _wait_until_free(root, before, run_id, files)
                    if ours is not None:
                        ours._users += 1
                        return ours
                lease = cls(root, 1 + (before or 0), files, run_id, interval_s)
                lease.before = last_run(root, files)
                if lease._make():
                    return lease
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be saved in {root}: {error.strerror or error} ({error.filename}). Make the folder "
                "writable, free some space, or choose another one.",
                path=root,
            ) from error

    def pass_to(self, run_id: str) -> None:
        """Give the lease to another run in this process. If writing the file fails, the next renewal repeats it.

        The file is written immediately: after a crash, a new process continues the run that the file names.
        """
        if run_id != self.run_id:
            self.run_id = run_id
            self._renew()

    def check(self) -> None:
        """Check that the lease is still valid; call it right before a commit or a deletion, on any thread.

        Raises:
            LeaseLostError: the folder was taken over, or the folder or the lease file is gone, so that nothing may be
                written there.
            CheckpointError: the lease could not be read.
        """
        try:
            problem = self._problem()
        except OSError as error:
            raise CheckpointError(
                f"could not look at the lease {self.path}: {error.strerror or error}. The older checkpoints are "
                "intact.",
                path=self.path,
            ) from error
        if problem:
            raise LeaseLostError(
                f"this run does not own {self.root} any more, so it writes nothing there: {problem}.", path=self.root
            )

    def release(self) -> None:
        """Release the lease. A lease that was taken twice must be released twice. A further call does nothing."""
        if os.getpid() != int(self._owner.split("-")[-2]):
            return  # a forked child does not own its copy of the lease
        self._users -= 1
        if self._users > 0 or self._stop.is_set():
            return
        self._stop.set()
        _held.pop(self._id, None)
        with self._writing:  # wait for a running renewal, since its write would undo the release
            try:
                if not self._problem():
                    self._files.replace(self.path, self._content(released=True))
            except OSError:
                pass  # no error, since other runs can take the folder once this process has ended

    # ---- the lease file

    def _make(self) -> bool:
        _held[self._id] = self
        try:
            made = self._files.create_exclusive(self.path, self._content())
            if made and _highest(self.root, self._files) != self.number:
                self._files.remove(self.path)  # another process has used and removed this number
                made = False
        except BaseException:
            del _held[self._id]
            raise
        if not made:
            del _held[self._id]
            return False
        for name in self._files.entries(self.root):
            match = _NAME.fullmatch(name)
            older = match is not None and int(match[1]) < self.number
            # Remove older leases, and files that a dead process has left half written.
            if older or (name.startswith(".lease-") and is_gone(name.rpartition("@")[2])):
                self._files.remove(self.root / name)
        threading.Thread(target=self._beat, name="instep-lease", daemon=True).start()
        return True

    def _content(self, released: bool = False) -> bytes:
        content = {
            "id": self._id,
            "owner": self._owner,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run_id": self.run_id,
            "job": read_job(),
            "command": shlex.join(hide_arguments(sys.orig_argv)[0]).partition("\n")[0][:200],
            "since": self._since,
            "interval_s": self._interval_s,
            "counter": self._counter,
            "released": released,
        }
        return json.dumps(content, indent=1).encode()

    def _problem(self) -> str:
        """Return the reason why this lease is no longer valid; "" if it is valid."""
        highest = _highest(self.root, self._files)
        there = None if highest is None else _read(self.root, highest, self._files)
        if isinstance(self.root, Path) and not self.root.is_dir():  # the folder is gone; object stores have none
            return (
                f"the folder {self.root} does not exist any more. It was removed or renamed, or its file system is no "
                "longer mounted. Put it back where its checkpoints are wanted, and start this run again"
            )
        if there is None or highest is None or highest < self.number:
            return (
                f"its lease {self.path.name} is gone, and the folder has no newer one: somebody removed it, or made "
                "the folder anew. Start this run again to take the folder"
            )
        if there.get("id") == self._id:
            return ""
        return (
            f"{_describe(there)} has taken it over. This run was suspended, or cut off from the file system, for "
            "longer than another start waits. End it; its last checkpoint is intact, and the other run goes on from "
            "there"
        )

    def _beat(self) -> None:
        missed = 0
        while not self._stop.wait(self._interval_s):
            problem = self._renew()
            missed = missed + 1 if problem else 0
            if missed == _WATCHED:
                with suppress(OSError, ValueError):  # stderr may be closed, but renewals must continue
                    sys.stderr.write(
                        f"instep: the lease {self.path} could not be renewed for {missed * self._interval_s:g} s "
                        f"({problem}); another host may take the folder over\n"
                    )

    def _renew(self) -> str:
        """Renew the lease by increasing its counter; return the error that prevented it, or ""."""
        with self._writing:
            try:
                if self._stop.is_set():
                    return ""
                problem = self._problem()  # does not end the renewals: an unmounted folder may come back
                if not problem:
                    self._counter += 1
                    self._files.replace(self.path, self._content())
                return problem
            except Exception as error:  # noqa: BLE001  any error, also of an object store; `_beat` tries again
                return f"{type(error).__name__}: {error}"


def check_seen(path: Path, files: Files, rank: int) -> None:
    """Raise an error if this rank does not see the lease file of rank 0, because they do not share a file system.

    Slow network file systems are given time: the rank looks for the file again for some seconds.

    Raises:
        CheckpointError: this rank does not see the lease.
    """
    deadline = time.monotonic() + SEEN_S
    while path.name not in files.entries(path.parent):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} (host {socket.gethostname()}) does not see {path}, which rank 0 has made. All ranks must "
                "see one file system: put the checkpoints on a shared one (default_root_dir, save_dir, dirpath).",
                path=path.parent,
            )
        time.sleep(0.1)


def _highest(root: Path, files: Files) -> int | None:
    return max((int(match[1]) for name in files.entries(root) if (match := _NAME.fullmatch(name))), default=None)


def _read(root: Path, number: int, files: Files) -> dict[str, Any] | None:
    """Read a lease file; return {} if its content is invalid, and None if the file does not exist."""
    try:
        content = parse_json(files.read(root / f".lease-{number:08d}", LEASE_BYTES))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return _checked(content) if isinstance(content, dict) else {}


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    """Return only the valid values of a lease file, since any program may have written the file."""
    texts = ("id", "owner", "host", "run_id", "command", "since")
    kept: dict[str, Any] = {
        key: value[:_LONG] for key in texts if isinstance(value := content.get(key), str) and value.isprintable()
    }
    for key, least in (("pid", 0), ("counter", 0), ("interval_s", 1e-3)):
        value = content.get(key)
        if isinstance(value, (int, float)) and least <= value <= _MOST[key]:
            kept[key] = value
    match content.get("job"):
        case [str() as job, int() as restart]:
            kept["job"] = [job, restart]
    return {**kept, "released": content.get("released") is True}


def last_run(root: Path, files: Files) -> str | None:
    """Return the id of the run that held the lease of a folder before this process did; None if unknown."""
    try:
        number = _highest(root, files)
        content = None if number is None else _read(root, number, files)
    except OSError:
        return None
    if content is None:
        return None
    ours = _held.get(str(content.get("id")))
    return content.get("run_id") if ours is None else ours.before


def _wait_until_free(root: Path, number: int, run_id: str, files: Files) -> Lease | None:
    """Wait until the lease with this number has ended, and return None.

    If this run holds the lease in this process, return the lease at once.

    Raises:
        FolderInUseError: the holder is alive: another process, or another run in this process.
    """
    first = _read(root, number, files)
    if first is None or first.get("released"):
        return None
    owner = str(first.get("owner"))
    ours = _held.get(str(first.get("id"))) if owner == this_process() else None
    if ours is not None and ours.run_id == run_id:
        return ours
    gone = _was_ours(first) or is_gone(owner)
    # The second condition is for a lease that this process has released, but could not mark as released in its file.
    if gone or (ours is None and owner == this_process()):
        return None
    if gone is None:
        wait_s = _WATCHED * float(first.get("interval_s", INTERVAL_S))
        sys.stderr.write(
            f"instep: {root} belongs to {_describe(first)}, of which is not known from here whether it still runs: "
            f"waiting up to {wait_s:g} s for a sign of life\n"
        )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(min(0.5, wait_s / 20))
            now = _read(root, number, files)
            if now is None or now.get("released"):
                return None
            if now != first:
                first = now
                break
        else:
            return None
    raise FolderInUseError(
        f"{root} is in use: {_describe(first)} saves its checkpoints there since {first.get('since', '?')}. Stop that "
        "run or wait for its end, or give this one another folder (default_root_dir, save_dir, dirpath). If it does "
        f"not run any more, remove {root / f'.lease-{number:08d}'}.",
        path=root,
    )


def _was_ours(content: dict[str, Any]) -> bool | None:
    """Return True if this job took the lease before it was restarted; None if that is unknown.

    The ranks from before the restart have ended, except for a rank on a host that was cut off from the network: before
    its next commit, that rank finds the higher lease number and does not write.
    """
    now, before = read_job(), content.get("job")
    return True if now is not None and before is not None and before[0] == now.id and before[1] < now.restart else None


def _describe(content: dict[str, Any]) -> str:
    if "pid" not in content:
        return "an unknown run, whose lease cannot be read,"
    who = f"host {content.get('host')}, pid {content['pid']}"
    if content.get("owner") == this_process():
        who += ", which is this process"
    return f"run {content.get('run_id')} ({who}: {content.get('command')})"
