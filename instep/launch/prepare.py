"""Command, environment, files and cores of the ranks that an agent starts; signal handlers are restored afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.errors import SettingError
from instep.health.error_report import AGENT_PID
from instep.launch.spec import LaunchSpec
from instep.state.environment import JOB_ID, MIN_NODES, RESTART, read_job
from instep.state.launchers import MEETING_FILE
from instep.state.secret import JOB_SECRET, JOB_SECRET_FILE, NO_SECRET, Secret, given_secret, make_secret, write_secret
from instep.utils.env import as_variables
from instep.utils.warn import warn_user

# Runs before the program, which then replaces it in the same process by exec; the kernel keeps the parent-death signal
# and the cores. Both are set inside the rank. The parent is checked again, since the agent may have died before that.
_BOOT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
if sys.argv[2]:
    os.sched_setaffinity(0, map(int, sys.argv[2].split(";")[int(sys.argv[3])].split(",")))
os.execv(sys.argv[4], sys.argv[4:])
"""


_SECRET_MADE = (
    "instep: node 0 has made a secret for this job. On each other node, run this line before `instep launch`:"
)
_FOLDER, _HELD = "instep-agent-", "held"

_SYSTEM = Path("/sys/devices/system")


def share_cores(count: int, system: Path = _SYSTEM, allowed: Sequence[int] | None = None) -> list[list[int]]:
    """Share the cores of this machine among its ranks.

    Ranks are spread evenly over the NUMA nodes, in order, as accelerators are. The ranks of one NUMA node share its
    cores evenly; hardware threads of a core stay together. If there are fewer cores than ranks, several ranks get the
    same core.

    Args:
        count: number of ranks on this machine.
        system: sysfs' folder of the system.
        allowed: the cores that this process may use; by default asked of the system.

    Returns:
        For each rank the numbers of its logical CPUs, at least one.
    """
    mine = sorted(os.sched_getaffinity(0)) if allowed is None else sorted(allowed)
    paths = sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    nodes = [cores for path in paths if (cores := _cores(path, mine))]
    nodes = nodes or [mine]
    shares: list[list[int]] = []
    for index, cores in enumerate(nodes):
        ranks = (index + 1) * count // len(nodes) - index * count // len(nodes)
        ordered = sorted(cores, key=lambda core: (_first_sibling(system, core), core))
        for rank in range(ranks):
            begin, end = rank * len(ordered) // ranks, (rank + 1) * len(ordered) // ranks
            shares.append(ordered[begin:end] or [ordered[begin]])
    return shares


def _cores(node: Path, allowed: Sequence[int]) -> list[int]:
    return sorted(_parse((node / "cpulist").read_text()) & set(allowed))


def _first_sibling(system: Path, core: int) -> int:
    try:
        return min(_parse((system / f"cpu/cpu{core}/topology/thread_siblings_list").read_text()))
    except (OSError, ValueError):
        return core


def _parse(text: str) -> set[int]:
    """Read `0-2,8` as {0, 1, 2, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


@contextlib.contextmanager
def agent_folder() -> Iterator[str]:
    """Make a private temporary folder for an agent, and remove folders that this user's killed agents left.

    A file in the folder is locked while the agent, or a rank forked from it, lives.
    """
    parent = tempfile.gettempdir()
    for name in os.listdir(parent):
        if name.startswith(_FOLDER):
            _remove_if_left(os.path.join(parent, name))
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        held = os.open(os.path.join(folder, f".{_HELD}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            # Other agents see the file only after it is locked.
            os.rename(os.path.join(folder, f".{_HELD}"), os.path.join(folder, _HELD))
            yield folder
        finally:
            os.close(held)


def _remove_if_left(folder: str) -> None:
    # The folder belongs to another user or agent, or another agent is removing it.
    with contextlib.suppress(OSError):
        seen = os.lstat(folder)
        if seen.st_uid != os.geteuid() or not stat.S_ISDIR(seen.st_mode) or stat.S_IMODE(seen.st_mode) != 0o700:
            return
        held = os.open(os.path.join(folder, _HELD), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(held)


def entrypoint(spec: LaunchSpec) -> tuple[str, tuple[str, ...]]:
    """Return the program and arguments with which a rank starts; torch's agent formats the arguments as templates.

    Raises:
        SettingError: there is no such program, or the system cannot pin ranks to cores.
    """
    program = shutil.which(spec.executable)
    if program is None:
        raise SettingError(
            f"executable={spec.executable!r} is not a program that can be run here: give its path, or put its folder "
            "into PATH",
            field="executable",
            got=spec.executable,
        )
    command = tuple(word.replace("$", "$$") for word in (program, *spec.command))
    if sys.platform != "linux":
        if spec.cpu_affinity:
            raise SettingError("cpu_affinity works on Linux only: leave it out", field="cpu_affinity", got=True)
        return program, command[1:]
    cores = ";".join(",".join(map(str, share)) for share in share_cores(spec.nproc)) if spec.cpu_affinity else ""
    return sys.executable, ("-I", "-S", "-c", _BOOT, str(os.getpid()), cores, "${local_rank}", *command)


def job_environment(spec: LaunchSpec, again: bool) -> dict[str, str]:
    """Make the variables of a job for its ranks.

    Args:
        spec: the job.
        again: whether this agent may be started again for the same job; a notebook never does that.
    """
    # SLURM does not requeue a command that was typed into a shell. All commands of one shell belong to one step, so the
    # step cannot tell them apart.
    known = read_job() if again and (JOB_ID in os.environ or not os.isatty(0)) else None
    job, restart = known or (uuid.uuid4().hex, 0)
    added = {AGENT_PID: str(os.getpid()), JOB_ID: job, RESTART: str(restart), **spec.env}
    if spec.min_nodes is not None:
        added[MIN_NODES] = str(spec.min_nodes)
    added |= as_variables({"hang_timeout_s": spec.hang_timeout_s})
    # Without this variable Hydra hides errors from instep.
    added.setdefault("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "1"))
    if "OMP_NUM_THREADS" not in {**os.environ, **added}:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        added["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc))
    return added


def secret_of(spec: LaunchSpec) -> Secret:
    """Return the job's secret: a new one for one node, the user's for several.

    If there is none, node 0 makes one and prints how to give it to the others. Other nodes run without a secret, after
    a warning.

    Raises:
        SettingError: the user's secret cannot be used.
    """
    if spec.num_nodes == 1:
        return make_secret()
    secret = given_secret(file=spec.secret_file)
    if secret is None and spec.rdzv_backend == "static" and spec.node_rank == 0:
        secret = make_secret()
        sys.stderr.write(f"{_SECRET_MADE}\nexport {JOB_SECRET}={secret.text()}\n")
    elif secret is None:
        warn_user(f"{NO_SECRET} If node 0 has printed a line that sets one, run it here, or they do not meet.")
        secret = Secret(b"")
    return secret


def private_environment(secret: Secret, folder: Path) -> dict[str, str | None]:
    """Return variables that point to files in the agent's folder; none contains the secret itself."""
    file = folder / "secret"
    write_secret(file, secret)
    return {JOB_SECRET: None, JOB_SECRET_FILE: str(file), MEETING_FILE: None}


@contextlib.contextmanager
def environment(added: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process in the block; torch's agent passes them to ranks. None removes a variable."""
    before = {name: os.environ.get(name) for name in added}
    _update(added)
    try:
        yield
    finally:
        _update(before)


def _update(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def signals_restored(signals: Iterable[signal.Signals]) -> Iterator[dict[signal.Signals, Any]]:
    """Restore the handlers of these signals at the end of the block, which gets the old handlers."""
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        yield before
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in before.items():
                # None means that C code installed the handler.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
