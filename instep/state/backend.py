"""The backend of the process group: chosen by the device, or checked where the user chose it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend

from instep.errors import SettingError, one_of
from instep.state.device import DeviceKind
from instep.state.environment import ProcessEnvironment
from instep.state.launchers import MPI
from instep.utils.imports import require


def resolve_backend(backend: str | None, kind: DeviceKind, environment: ProcessEnvironment) -> str:
    """Torch's full name of the backend for a kind of device.

    The group serves CPU tensors as well, so that a reduced metric need not visit the device.

    Args:
        backend: a name of torch's, such as "gloo", "nccl" or "cpu:gloo,cuda:nccl"; None for the device's own.
        kind: the device.
        environment: this process's place.

    Raises:
        SettingError: torch does not know the backend, was built without it, or cannot use it here.

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
        # By device also for the CPU: under its bare name torch makes the group without the store that gloo needs.
        return "cpu:mpi" if kind.name == "cpu" else f"cpu:mpi,{kind.name}:mpi"
    return f"cpu:gloo,{kind.name}:{backend}" if backend == kind.backend and kind.name != "cpu" else backend


def _check_backend(name: str, device: str, environment: ProcessEnvironment) -> None:
    known = [known for known in Backend.backend_list if known not in (Backend.UNDEFINED, Backend.FAKE)]
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
