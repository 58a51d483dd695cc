"""Rank, world size and address of a job, read from the variables of each launcher.

Only this file reads RANK and the like. If one launcher starts another (torchrun in a SLURM job, mpirun through srun),
the variables of both are set. The innermost launcher decides the rank of this process. The table begins with the
innermost launchers, and the first row whose condition is true is used:

| launcher   | fits where                                   | meets at, unless MASTER_ADDR and MASTER_PORT say it     |
|------------|----------------------------------------------|---------------------------------------------------------|
| torchrun   | RANK is set, by torchrun or by hand          | an error: torchrun sets both (our agent: a file, below) |
| openmpi    | OMPI_COMM_WORLD_SIZE is set                  | on one node: a port of the job's name; else as mvapich  |
| mvapich    | MV2_COMM_WORLD_SIZE is set                   | an error that says how mpirun passes them on            |
| intelmpi   | as mpich, and an I_MPI_... variable is set   | the same                                                |
| mpich      | PMI_SIZE is set, and not by srun alone       | the same                                                |
| slurm      | a step of several tasks, started by srun     | the first host of the node list, a port of the job's id |
| xla        | PJRT_LOCAL_PROCESS_COUNT is set              | where torch_xla says                                    |
| none       | otherwise: the process is alone              | nowhere                                                 |

These are single processes: a shell of `salloc` or `sbatch` without srun, a SLURM step of one task (`salloc`'s own shell
may be one), and the shell of `srun --pty bash`. It is an error if the chosen row says that the process is alone, but
the variables of another launcher, or WORLD_SIZE, say that there are several. Only torchrun's own single process is
allowed there: a SLURM job of several tasks may start torchrun in each task.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from instep.errors import SettingError
from instep.state.environment import Launcher, ProcessEnvironment, read_number
from instep.utils.imports import require

Environ = Mapping[str, str]
MEETING_FILE = "INSTEP_MEETING_FILE"
MPI: tuple[Launcher, ...] = ("openmpi", "mvapich", "intelmpi", "mpich")


class _Variables(NamedTuple):
    """Names of the environment variables that a launcher sets."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_TORCHRUN = _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Variables(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_MVAPICH = _Variables(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_HYDRA = _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
_STEP = ("SLURM_STEP_NUM_TASKS", *_STEP_ID)  # variables that srun sets, but sbatch and salloc do not


def read_environment(environ: Environ | None = None) -> ProcessEnvironment:
    """Read the rank and world size of this process from the launcher's variables, by the table at the top of this file.

    A user or another program may set torchrun's variables. For more than one process, `RANK`, `WORLD_SIZE` and
    `LOCAL_RANK` are required. If the others are missing, all processes are taken to be on one node.

    Args:
        environ: the environment variables; `os.environ` by default.

    Returns:
        The place of the process. No variable is changed.

    Raises:
        SettingError: a variable is missing, is not a number, is out of range, or contradicts another variable.
        MissingPackageError: torch_xla's launcher started the process, but torch_xla is not installed.

    Example:
        >>> read_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}).rank
        1
        >>> read_environment({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).launcher  # no srun
        'none'
    """
    environ = os.environ if environ is None else environ
    place = next(_places(environ), ProcessEnvironment())
    if place.launcher != "torchrun":
        _check_world_size(environ, place)
    by_agent = place.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in environ
    # Raise an error if an outer launcher started a "single" process as one of several. Only torchrun may start one
    # process in each of many SLURM tasks.
    if place.world_size == 1 and not by_agent:
        _check_alone(environ, place)
    return place


def meeting_url(place: ProcessEnvironment, environ: Environ | None = None) -> str:
    """Return the URL with which torch's `rendezvous` connects the processes.

    Raises:
        SettingError: neither the variables nor the launcher give an address and a port.

    Example:
        >>> step = {"SLURM_JOB_ID": "4012", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-09,12]"}
        >>> meeting_url(ProcessEnvironment(world_size=4, launcher="slurm"), step)
        'tcp://gpu07:24012'
    """
    environ = os.environ if environ is None else environ
    host, port = environ.get("MASTER_ADDR", ""), read_number(environ, "MASTER_PORT", 0, high=65535)
    if place.launcher == "slurm":
        host, port = host or _first_host(environ), port or _port_of_job(environ)
    elif place.launcher == "openmpi" and place.num_nodes == 1:
        name = environ.get("PMIX_NAMESPACE", "")
        host, port = host or "127.0.0.1", port or (_port_of(zlib.crc32(name.encode())) if name else 0)
    if place.launcher == "xla" and not host:
        # torch_xla's backend reads this URL
        require("torch_xla.distributed.xla_backend", extra="xla", purpose="meeting by torch_xla")
        return "xla://"
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not value]
    if missing:
        hint = "Start them with torchrun, or set"
        if place.launcher in MPI:
            hint = "Let mpirun pass them on (Open MPI: -x MASTER_ADDR=... ; MPICH, Intel MPI: -genv MASTER_ADDR ...):"
        raise SettingError(
            f"{place.launcher} started {place.world_size} processes, but {' and '.join(missing)} is not set: the "
            f"processes do not know where to meet. {hint} MASTER_ADDR to rank 0's machine and MASTER_PORT to a free "
            f"port of it.",
            field=missing[0],
        )
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def meeting_variable(address: str, port: int, path: str) -> str:
    """Return the value of the variable INSTEP_MEETING_FILE: an address, and the file that replaces it."""
    return f"{address}:{port}={path}"


def meeting_file(environ: Environ | None = None) -> str:
    """Return the file by which the processes of one node connect, instead of a port; "" if there is none.

    The variable `INSTEP_MEETING_FILE` also has the address that the file replaces. So a program that a rank starts with
    another address, and that inherits the variable, does not use the file.

    Example:
        >>> environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5", "INSTEP_MEETING_FILE": "127.0.0.1:5=/a/ranks-0"}
        >>> meeting_file(environ)
        '/a/ranks-0'
        >>> meeting_file({**environ, "MASTER_PORT": "6"})
        ''
    """
    environ = os.environ if environ is None else environ
    address = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    stands_for, _, path = environ.get(MEETING_FILE, "").partition("=")
    return path if stands_for == address else ""


def _places(environ: Environ) -> Iterator[ProcessEnvironment]:
    for fits, read in _READERS:
        if fits(environ):
            yield read(environ)


def _check_world_size(environ: Environ, place: ProcessEnvironment) -> None:
    """Raise SettingError if WORLD_SIZE, which a job script may set, differs from the world size of the launcher."""
    world_size = read_number(environ, "WORLD_SIZE", place.world_size, low=1)
    if world_size != place.world_size:
        if place.launcher == "none":
            read_number(environ, "RANK", beside=_TORCHRUN)
        raise SettingError(
            f"WORLD_SIZE={world_size}, but {place.launcher} started {place.world_size} processes: unset it, or set it "
            f"to their number.",
            field="WORLD_SIZE",
            got=world_size,
        )


def _check_alone(environ: Environ, place: ProcessEnvironment) -> None:
    for outer in _places(environ):
        if outer.world_size > 1:
            raise SettingError(
                f"{place.launcher}'s variables say a world size of 1, but {outer.launcher} started this process as one "
                f"of {outer.world_size}: each would believe to be alone. Unset {place.launcher}'s variables (RANK and "
                f"WORLD_SIZE, if set by hand), or set them to the whole job's.",
                field="WORLD_SIZE",
                got=1,
            )


# ---- torchrun and MPI


def _torchrun(environ: Environ) -> ProcessEnvironment:
    nodes = ("GROUP_RANK", "GROUP_WORLD_SIZE")

    def number(name: str, default: int | None = None, low: int = 0, high: int | None = None) -> int:
        return read_number(environ, name, default, low, high, beside=(*_TORCHRUN, *nodes))

    world_size = number("WORLD_SIZE", low=1)
    rank = number("RANK", high=world_size - 1)
    num_nodes = number("GROUP_WORLD_SIZE", 1, low=1, high=world_size)
    local_world_size = number("LOCAL_WORLD_SIZE", world_size if num_nodes == 1 else None, 1, world_size)
    if num_nodes == 1 and local_world_size < world_size:
        # torchrun always sets GROUP_WORLD_SIZE. If it is not set and there are fewer processes on this node than in
        # total, all nodes are assumed to have the same number of processes.
        num_nodes = -(-world_size // local_world_size)
    return ProcessEnvironment(
        rank=rank,
        local_rank=number("LOCAL_RANK", 0 if world_size == 1 else None, high=local_world_size - 1),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=number("GROUP_RANK", rank // local_world_size, high=num_nodes - 1),
        num_nodes=num_nodes,
        launcher="torchrun",
        restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
    )


def _mpi(launcher: Launcher, names: _Variables) -> Callable[[Environ], ProcessEnvironment]:
    """Make a function that reads the variables of MPI, which does not number the nodes.

    Until the processes are connected, nodes are assumed to have equal numbers of processes, in rank order.
    """

    def read(environ: Environ) -> ProcessEnvironment:
        world_size = read_number(environ, names.world_size, low=1, beside=names)
        alone = world_size == 1
        rank = read_number(environ, names.rank, 0 if alone else None, high=world_size - 1, beside=names)
        size = read_number(environ, names.local_world_size, 1 if alone else None, 1, world_size, beside=names)
        local_rank = read_number(environ, names.local_rank, 0 if alone else None, high=size - 1, beside=names)
        return ProcessEnvironment(
            rank, local_rank, world_size, size, rank // size, -(-world_size // size), launcher=launcher
        )

    return read


def _is_hydra(environ: Environ) -> bool:
    """Return True if mpiexec started this process. srun may set PMI_SIZE too, but not MPI_LOCALRANKID."""
    several = read_number(environ, "PMI_SIZE", 1) > 1
    return "PMI_SIZE" in environ and (_HYDRA.local_rank in environ or (several and not _is_srun(environ)))


def _is_intel(environ: Environ) -> bool:
    return _is_hydra(environ) and any(name.startswith("I_MPI_") for name in environ)


# ---- SLURM


def _is_srun(environ: Environ) -> bool:
    if not any(name in environ for name in _STEP):
        # A shell has SLURM_PROCID 0, so a higher number is a task of srun; `_slurm` reports which variable is missing.
        return read_number(environ, "SLURM_PROCID", 0) > 0
    if environ.get("SLURM_JOB_NAME") == "bash" and "SLURM_PTY_PORT" in environ and _first_of(environ, *_STEP_ID) == "0":
        return False
    return read_number(environ, _size_name(environ), low=1, beside=_STEP) > 1


def _size_name(environ: Environ) -> str:
    # the step's own variable comes first, since salloc may pass on SLURM_NTASKS of the whole job
    known = "SLURM_STEP_NUM_TASKS" in environ or not any(name in environ for name in _STEP)
    return "SLURM_STEP_NUM_TASKS" if known else "SLURM_NTASKS"


def _slurm(environ: Environ) -> ProcessEnvironment:
    beside = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", *_STEP)
    world_size = read_number(environ, _size_name(environ), low=1, beside=beside)
    per_node = _tasks_per_node(environ, world_size)
    one_node = len(per_node) == 1
    node_rank = read_number(environ, "SLURM_NODEID", 0 if one_node else None, high=len(per_node) - 1, beside=beside)
    rank = read_number(environ, "SLURM_PROCID", high=world_size - 1, beside=beside)
    return ProcessEnvironment(
        rank=rank,
        local_rank=read_number(environ, "SLURM_LOCALID", high=per_node[node_rank] - 1, beside=beside),
        world_size=world_size,
        local_world_size=per_node[node_rank],
        node_rank=node_rank,
        num_nodes=len(per_node),
        launcher="slurm",
    )


def _tasks_per_node(environ: Environ, world_size: int) -> list[int]:
    """Return the number of tasks on each node: `2(x3),1` is [2, 2, 2, 1].

    If SLURM_STEP_TASKS_PER_NODE is not set, divide the tasks evenly.
    """
    text = _first_of(environ, "SLURM_STEP_TASKS_PER_NODE")
    if text:
        parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
        tasks = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
        if None in parts or sum(tasks) != world_size:
            raise SettingError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} does not add up to the step's {world_size} tasks",
                field="SLURM_STEP_TASKS_PER_NODE",
                got=text,
            )
        return tasks
    name = _name_of(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    nodes = read_number(environ, name, 1, low=1, high=world_size)
    return [world_size // nodes + (node < world_size % nodes) for node in range(nodes)]


def _first_host(environ: Environ) -> str:
    """Return rank 0's host, the first one of SLURM's node list: gpu07 in `gpu[07-09,12],login1`."""
    hosts = _first_of(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) if first else ""


def _port_of_job(environ: Environ) -> int:
    """Return a port that differs between SLURM jobs and steps."""
    job = read_number(environ, _name_of(environ, "SLURM_JOB_ID", "SLURM_JOBID"), 0)
    step = read_number(environ, _name_of(environ, *_STEP_ID), 0)
    return _port_of(job + 101 * step) if job else 0


def _port_of(number: int) -> int:
    """Return a port from 20000 to 29999, which is below the ports that the kernel assigns."""
    return 20000 + number % 10000


def _first_of(environ: Environ, *names: str) -> str:
    return environ.get(_name_of(environ, *names), "")


def _name_of(environ: Environ, *names: str) -> str:
    """Return the first of these names whose variable is set; if none is set, the first name."""
    return next((name for name in names if environ.get(name)), names[0])


# ---- XLA


def _xla(environ: Environ) -> ProcessEnvironment:
    """Read rank and world size from torch_xla's runtime. Its launcher sets only the rank on the node as a variable."""
    runtime = require("torch_xla.runtime", extra="xla", purpose="a process that torch_xla's launcher started")
    size = read_number(environ, "PJRT_LOCAL_PROCESS_COUNT", low=1)
    world_size = int(runtime.world_size())
    return ProcessEnvironment(
        rank=int(runtime.global_ordinal()),
        local_rank=read_number(environ, "PJRT_LOCAL_PROCESS_RANK", 0 if size == 1 else None, high=size - 1),
        world_size=world_size,
        local_world_size=size,
        node_rank=int(runtime.host_index()),
        num_nodes=-(-world_size // size),
        launcher="xla",
    )


_READERS: tuple[tuple[Callable[[Environ], bool], Callable[[Environ], ProcessEnvironment]], ...] = (
    (lambda environ: "RANK" in environ, _torchrun),
    (lambda environ: _OPEN_MPI.world_size in environ, _mpi("openmpi", _OPEN_MPI)),
    (lambda environ: _MVAPICH.world_size in environ, _mpi("mvapich", _MVAPICH)),
    (_is_intel, _mpi("intelmpi", _HYDRA)),
    (_is_hydra, _mpi("mpich", _HYDRA)),
    (_is_srun, _slurm),
    (lambda environ: "PJRT_LOCAL_PROCESS_COUNT" in environ, _xla),
)
