"""Creating, joining and leaving the process groups of a job.

In addition to torch's default group for data, separate CPU (gloo) groups are created for control messages, so that
these never wait for collectives of a training step or get mixed up with them.

A rank that failed must be able to end while other ranks are still in a collective. So pending operations are aborted
after an error and at exit. Otherwise gloo's destructor would wait for the time-out of these operations, and destroying
the group would kill the process with SIGABRT.
"""

from __future__ import annotations

import atexit
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Backend, PrefixStore, Store, _abort_process_group
from torch.distributed.rendezvous import rendezvous

from instep.errors import SettingError, one_of
from instep.state import rank_records
from instep.state.device import DeviceKind
from instep.state.environment import ProcessEnvironment, read_job
from instep.state.launchers import MPI, meeting_file, meeting_url
from instep.state.messages import exchange
from instep.state.rank_records import record_end, wait_for_start
from instep.state.secret import secret_of_ranks, use_secret
from instep.utils.imports import require

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def resolve_backend(backend: str | None, kind: DeviceKind, environment: ProcessEnvironment) -> str:
    """Return torch's full name of the backend for a kind of device.

    For the device's own backend, the name also includes gloo for CPU tensors, so that a metric on the CPU can be
    reduced without being moved to the device.

    Args:
        backend: torch's name, such as "gloo", "nccl" or "cpu:gloo,cuda:nccl"; None for the backend of the device.
        kind: kind of the device.
        environment: rank and world size of this process.

    Raises:
        SettingError: torch does not know the backend, was built without it, or cannot use it with this device or
            launcher.

    Example:
        >>> from instep.state import find_device_kind
        >>> resolve_backend(None, find_device_kind("cpu"), ProcessEnvironment(world_size=2))
        'gloo'
    """
    backend = kind.backend if backend is None else backend.lower()
    if backend is None:
        raise SettingError(
            f"this is one of {environment.world_size} processes, but torch has no collectives for {kind.name}. Use the "
            f"CPU (PartialState(cpu=True), Trainer(accelerator='cpu')) or one process."
        )
    if backend == kind.backend and kind.extension is not None:
        require(kind.extension, extra=kind.name if kind.name == "xla" else None, purpose=f"the backend {backend}")
    for part in backend.split(","):
        device, _, name = part.rpartition(":")
        _check_backend(name, device or kind.name, environment)
    if backend == "mpi":
        # With the plain name "mpi", torch would create the default group without a store. The gloo groups, which are
        # created later, need this store.
        return "cpu:mpi" if kind.name == "cpu" else f"cpu:mpi,{kind.name}:mpi"
    return f"cpu:gloo,{kind.name}:{backend}" if backend == kind.backend and kind.name != "cpu" else backend


def _check_backend(name: str, device: str, environment: ProcessEnvironment) -> None:
    known = [known for known in Backend.backend_list if known not in (Backend.UNDEFINED, "fake")]
    if name not in known:
        raise one_of("backend", name, known)
    if not dist.is_backend_available(name):
        raise SettingError(
            f"backend={name!r}: this torch ({torch.__version__}) was built without it. Leave backend out to take the "
            f"device's own, or install a torch that has it.",
            field="backend",
            got=name,
        )
    devices = Backend.backend_capability.get(name)
    if devices is not None and device not in devices:
        raise SettingError(
            f"backend={name!r} serves {' and '.join(devices)}, but this process computes on {device}. Leave backend "
            f"out to take the one of the device.",
            field="backend",
            got=name,
        )
    if name == "mpi" and environment.launcher not in (*MPI, "slurm"):
        raise SettingError(
            f"backend='mpi' numbers the processes as mpirun or srun started them, but {environment.launcher} started "
            f"these. Start them with mpirun, or leave backend out.",
            field="backend",
            got=name,
        )


@dataclass(frozen=True)
class Groups:
    """The process groups of a job with more than one process.

    Args:
        default: torch's default group.
        control: gloo group of the same ranks, for control messages.
        step: another gloo group of the same ranks, for agreements in each training step. The messages of an agreement
            cannot be confused with those of other calls, which use the control group.
        owned: whether instep created the default group; False if the user did.
        timeout: time limit of every operation of the control group.
        hosts: host name of each rank's machine.
        turns: counter of this rank's `wait_for_everyone` calls.
    """

    default: ProcessGroup
    control: ProcessGroup
    step: ProcessGroup
    owned: bool
    timeout: timedelta
    hosts: tuple[str, ...]
    turns: Iterator[int] = field(default_factory=count)


_LETTING_GO_S = 0.05

# There is one store per process. A group that is created again uses a new prefix in it, so that it never reads the
# addresses that the previous group has left.
_store: Store | None = None
_generation = 0


def exists() -> bool:
    """Return True if torch already has a default process group in this process."""
    return dist.is_initialized()


def adopt(environment: ProcessEnvironment) -> tuple[str, Groups]:
    """Create instep's groups beside a default group that the user's code has created. Collective.

    Args:
        environment: rank and world size of this process.

    Returns:
        Torch's name of the default group's backend, and all groups.
    """
    return dist.get_backend(), _leave_in_the_end(_with_control_group(environment, None, owned=False))


def join(environment: ProcessEnvironment, backend: str, options: dict[str, Any]) -> Groups:
    """Create the process groups of the job. Collective over all its processes.

    Args:
        environment: rank and world size of this process.
        backend: torch's name for the backend, such as "gloo" or "cpu:gloo,cuda:nccl".
        options: arguments for `init_process_group`: `timeout` of every operation, `pg_options` and `device_id`.

    Raises:
        SettingError: the address at which the processes connect is unknown.
    """
    timeout: timedelta | None = options.get("timeout")
    store = _next_store(environment, {} if timeout is None else {"timeout": timeout})
    wait_for_start(store, environment.rank, environment.world_size, (timeout or default_pg_timeout).total_seconds())
    dist.init_process_group(backend, store=store, rank=environment.rank, world_size=environment.world_size, **options)
    try:
        groups = _with_control_group(environment, timeout, owned=True)
    except BaseException:
        dist.destroy_process_group()
        raise
    return _leave_in_the_end(groups)


def check_existing(environment: ProcessEnvironment) -> None:
    """Raise SettingError if a default group exists that contradicts the environment variables.

    Raises:
        SettingError: this process has another rank or world size in the group.
    """
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (environment.rank, environment.world_size):
        raise SettingError(
            f"a process group exists already, in which this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but the environment says rank {environment.rank} of {environment.world_size}. "
            f"Set RANK, WORLD_SIZE and LOCAL_RANK to match, or let instep make the group."
        )


def leave(groups: Groups, abort: bool = False) -> None:
    """Leave the process groups. May be called twice.

    Args:
        groups: groups that `join` returned. A default group that the user created is not destroyed.
        abort: whether to abort pending operations of all groups, including the default one, without waiting. For use
            after an error and at exit.
    """
    atexit.unregister(_leave_at_exit)
    if not is_current(groups):
        return
    groups.control.abort()  # no rank waits for messages of this group any more
    groups.step.abort()
    if not groups.owned:
        dist.destroy_process_group(groups.step)
        dist.destroy_process_group(groups.control)
    elif abort:
        _abort_process_group()
    else:
        dist.destroy_process_group()


def is_current(groups: Groups) -> bool:
    """Return True if torch's default group is still the group that was joined."""
    return _world() is groups.default


def _leave_in_the_end(groups: Groups) -> Groups:
    # The exit handler is registered here and not at import, since a process that never joined a group needs none.
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit, groups)
    return groups


def _leave_at_exit(groups: Groups) -> None:
    if is_current(groups):
        record_end(groups.control)
    leave(groups, abort=True)
    # Wait for gloo's threads, which free the tensors of operations that have just ended. They need Python's GIL for
    # this. If they request it during the interpreter's shutdown, the process ends with SIGABRT.
    time.sleep(_LETTING_GO_S)


def _world() -> Any:
    return dist.group.WORLD


def _with_control_group(environment: ProcessEnvironment, timeout: timedelta | None, owned: bool) -> Groups:
    use_secret(secret_of_ranks(environment))
    control: Any = dist.new_group(backend="gloo", timeout=timeout, group_desc="instep_control")
    step: Any = dist.new_group(backend="gloo", timeout=timeout, group_desc="instep_step")
    # All ranks take part in this exchange, so after it all are connected, and none needs the store any more. Then rank
    # 0, which may host the store, can end before the others.
    hosts = tuple(map(str, exchange(socket.gethostname(), control)))
    rank_records.note_hosts(hosts)
    return Groups(_world(), control, step, owned, timeout or default_pg_timeout, hosts)


def _next_store(environment: ProcessEnvironment, kwargs: dict[str, Any]) -> Store:
    global _store, _generation
    if _store is None:
        path = meeting_file()
        if path:
            # -1 means no fixed number of ranks. With a number, the first ranks that end would remove the file.
            _store = dist.FileStore(path, -1)
            _store.set_timeout(kwargs.get("timeout", default_pg_timeout))
        else:
            _store = next(rendezvous(meeting_url(environment), environment.rank, environment.world_size, **kwargs))[0]
    # The prefix holds the number of restarts, so that a rank never reads entries of an earlier start. On one node, all
    # ranks have the same restart count. On several nodes, the counts of torchrun's agents may differ, so the count of
    # the job is used, which is the same on all nodes: instep's agents or SLURM set it. Without a job it is 0.
    job = read_job()
    attempt = environment.restart_count if environment.num_nodes == 1 else 0 if job is None else job.restart
    _generation += 1
    return PrefixStore(f"instep/{attempt}/{_generation}", _store)
