"""Which process a temporary folder belongs to, and whether that process is gone."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from pathlib import Path

_PATTERN = re.compile(r"(?P<host>.+)-(?P<pid>\d+)-(?P<life>[0-9a-f]{8})")


def this_process() -> str:
    """A name for this process that no later one gets: host, process id, and a digest of boot and start time."""
    pid = os.getpid()
    return f"{_host()}-{pid}-{_life(pid)}"


def is_gone(owner: str) -> bool | None:
    """Whether a process named by `this_process` has ended; None where that cannot be known from here (another host)."""
    match = _PATTERN.fullmatch(owner)
    if match is None or match["host"] != _host():
        return None
    pid = int(match["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it runs, as another user
    return _life(pid) != match["life"]  # the id was given to another process: containers start with the same ones


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:40] or "host"


def _life(pid: int) -> str:
    """Differs between two processes with the same id; the same for all where the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Field 22 is the start in clock ticks since boot; the name in field 2 may hold spaces and brackets.
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "00000000"
    return hashlib.blake2b(f"{boot} {started}".encode(), digest_size=4).hexdigest()
