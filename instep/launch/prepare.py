"""Prepare what the ranks of an agent start with: command, environment, files, cores; and restore signal handlers."""

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

# Code that runs in the rank before the program: it sets the parent-death signal and the cores, and then replaces itself
# by the program in the same process (exec). The kernel keeps both settings. After setting the signal, the code checks
# the parent, since the agent may have died before.
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
    """Divide the cores of this machine among its ranks.

    Ranks are spread evenly over the NUMA nodes, in order, as accelerators are. The ranks of a NUMA node share its cores
    evenly; hardware threads of a core stay together. If there are fewer cores than ranks, several ranks get the same
    core.

    Args:
        count: number of ranks on this machine.
        system: folder of sysfs that describes NUMA nodes (`node/`) and cores (`cpu/`).
        allowed: cores that this process may use; None: those of its CPU affinity.

    Returns:
        For each rank, the numbers of its logical CPUs, at least one.
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
    """Make a private temporary folder for an agent, and remove the folder at the end of the `with` block.

    First, remove folders that earlier agents of this user have left because they were killed. A file in each folder is
    locked as long as its agent, or a rank that was forked from its agent, is alive; such a folder is not removed.
    """
    parent = tempfile.gettempdir()
    for name in os.listdir(parent):
        if name.startswith(_FOLDER):
            _remove_if_left(os.path.join(parent, name))
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder:
        held = os.open(os.path.join(folder, f".{_HELD}"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            # The file gets its final name only after it is locked, so that other agents never see it unlocked.
            os.rename(os.path.join(folder, f".{_HELD}"), os.path.join(folder, _HELD))
            yield folder
        finally:
            os.close(held)


def _remove_if_left(folder: str) -> None:
    # An OSError means that the folder belongs to another user or a living agent, or that another agent removes it.
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
    """Return the program and the arguments with which a rank starts; torch's agent replaces `${local_rank}` in them.

    Raises:
        SettingError: the program does not exist, or the system cannot pin ranks to cores.
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
    """Return the environment variables of a job for its ranks.

    Args:
        spec: the job.
        again: whether to look for the id of a job that a launcher, such as SLURM, may have restarted. False in a
            notebook, where each job is new.
    """
    # A job that was started in a terminal is always new: SLURM does not requeue a command that was typed into a shell,
    # and all commands of a shell belong to the same step, so the step does not identify a job.
    known = read_job() if again and (JOB_ID in os.environ or not os.isatty(0)) else None
    job, restart = known or (uuid.uuid4().hex, 0)
    added = {AGENT_PID: str(os.getpid()), JOB_ID: job, RESTART: str(restart), **spec.env}
    if spec.min_nodes is not None:
        added[MIN_NODES] = str(spec.min_nodes)
    added |= as_variables({"hang_timeout_s": spec.hang_timeout_s})
    # Without this variable, Hydra catches exceptions before instep can report them.
    added.setdefault("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "1"))
    if "OMP_NUM_THREADS" not in {**os.environ, **added}:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        added["OMP_NUM_THREADS"] = str(max(1, cores // spec.nproc))
    return added


def secret_of(spec: LaunchSpec) -> Secret:
    """Return the secret of the job: a new one for a single node; for several nodes, the one that the user has set.

    If the user has set none, node 0 of a static rendezvous makes a secret and prints how to give it to the other nodes.
    All other nodes then run without a secret, after a warning.

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
    """Write the secret to a file in the agent's folder, and return variables that name the file, not the secret.

    The value None removes a variable.
    """
    file = folder / "secret"
    write_secret(file, secret)
    return {JOB_SECRET: None, JOB_SECRET_FILE: str(file), MEETING_FILE: None}


@contextlib.contextmanager
def environment(added: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of this process inside the block, because torch's agent passes them to ranks.

    The value None removes a variable.
    """
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
    """Restore the handlers of signals at the end of the `with` block; yield a dict of these handlers by signal."""
    before = {signum: signal.getsignal(signum) for signum in signals}
    try:
        yield before
    finally:
        if threading.current_thread() is threading.main_thread():
            for signum, handler in before.items():
                # None means that C code installed the handler, and Python cannot restore it.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
