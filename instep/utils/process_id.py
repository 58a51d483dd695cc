"""Unique names for processes, used in the names of temporary folders, and a check whether a named process has ended."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path

_PATTERN = re.compile(r"(?P<host>.+)-(?P<pid>[0-9]{1,9})-(?P<life>[0-9a-f]{8})")

_UNKNOWN = "00000000"  # digest if the start time of a process cannot be read: no /proc, or it hides the process


def this_process() -> str:
    """Return a unique name of this process, made of host, process id, and a digest of boot id and start time."""
    pid = os.getpid()
    return f"{_host()}-{pid}-{_life(pid)}"


def is_gone(owner: str) -> bool | None:
    """Return whether a process has ended; None if this host cannot know. `owner` is its name from `this_process`."""
    match = _PATTERN.fullmatch(owner)
    if match is None or match["host"] != _host():
        return None
    pid = int(match["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # PermissionError: the process is alive, and belongs to another user
    life = _life(pid)
    if life != match["life"]:  # another process has the same id now; in each container the ids start at 1 again
        return None if life == _UNKNOWN else True
    return state_of(pid) in ("Z", "X")


def _host() -> str:
    """Return the host name with a digest of boot id and process namespace, since containers may have the same name."""
    name = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:31] or "host"
    try:
        ids = f"{_boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # raised if the system is not Linux
        return name
    return f"{name}_{_digest(ids)}"


def state_of(pid: int) -> str:
    """Return the state letter that the kernel has for a process, as `ps` shows it; "" if there is no such process.

    "T": stopped. "Z" and "X": ended, but the parent process has not yet read the exit status.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _life(pid: int) -> str:
    """Return a digest that differs between two processes with the same id, if the system tells their start times."""
    try:
        boot = _boot_id()
        # Field 22 is the start time in clock ticks since boot; the name in field 2 may have spaces and brackets.
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return _UNKNOWN
    return _digest(f"{boot} {started}")
