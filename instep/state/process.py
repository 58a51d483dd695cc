"""`Process`: the record whose values `PartialState` shows. It is built completely or not at all, and never changed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from instep.errors import SettingError, StateError, one_of
from instep.state import collective_checks, process_group
from instep.state.device import DeviceKind, DistributedType, device_of, find_device_kind, make_current
from instep.state.environment import ProcessEnvironment
from instep.state.launchers import MPI, read_environment
from instep.state.process_group import resolve_backend
from instep.utils.checks import FLAG
from instep.utils.env import from_env, misspelt_variables, variable_of
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OPTIONS = ("backend", "timeout", "pg_options", "device_id")


@dataclass(frozen=True)
class Process:
    """Record of this process: its rank, device and groups. `PartialState` shows these values.

    Args:
        environment: rank and world size of this process in its job.
        device: device of the process.
        distributed_type: kind of the job's processes.
        backend: backend of the process group, by torch's name; None for a single process.
        debug: whether checked mode is on.
        groups: the process groups; None for a single process.
        asked: arguments of the first construction, with which later arguments are compared.
    """

    environment: ProcessEnvironment
    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    debug: bool
    groups: process_group.Groups | None
    asked: dict[str, Any]


_process: Process | None = None
_gone = "no PartialState() was built in this process yet"
_DESTROYED = (
    "its process group was destroyed, by Accelerator.end_training or destroy_process_group. What all processes do "
    "together, such as saving a model, comes before that"
)


def ensure(cpu: bool | None, debug: bool | None, xla: bool | None, kwargs: dict[str, Any]) -> None:
    """Build the record of this process; if it exists, check that the arguments do not contradict it."""
    global _process
    asked = _checked({"cpu": cpu, "debug": debug, "xla": xla}, kwargs)
    if _process is None or not _is_whole(_process):
        _process = None
        _process = _build(asked)
        alone = "INSTEP_AGENT_PID" not in os.environ  # an agent of instep warns of misspelt variables itself
        if alone and _process.environment.rank == 0 and (misspelt := misspelt_variables()):
            warn_user(misspelt)
    else:
        _compare(asked, _process)


def is_held() -> bool:
    """Return True if this process has a record, and the record's process group still exists."""
    return _process is not None and _is_whole(_process)


def held() -> Process:
    """Return the record of this process; raise StateError if there is none."""
    if _process is None:
        raise StateError(f"the process state holds nothing: {_gone}. Build PartialState() (again) first.")
    if not _is_whole(_process):
        raise StateError(f"the process state holds nothing: {_DESTROYED}. Build PartialState() again first.")
    return _process


def step_group() -> ProcessGroup | None:
    """Return the CPU process group for agreements of the ranks in each step; None for a single process."""
    groups = held().groups
    return None if groups is None else groups.step


def leave_group(abort: bool) -> None:
    """Leave the process group and drop the record of this process; a single process keeps its record."""
    global _process, _gone
    if _process is not None and _process.groups is not None:
        groups = _process.groups
        _process, _gone = None, _DESTROYED
        process_group.leave(groups, abort=abort)


def reset() -> None:
    """Leave the process group, if there is one, and drop the record of this process, also of a single process."""
    global _process, _gone
    leave_group(abort=True)
    _process, _gone = None, "it was reset"


def _is_whole(process: Process) -> bool:
    return process.groups is None or process_group.is_current(process.groups)


def _checked(switches: dict[str, bool | None], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check the arguments of `PartialState`; return those that are not None."""
    for name in kwargs:
        if name not in _OPTIONS:
            raise one_of("PartialState's argument", name, (*switches, *_OPTIONS))
    asked = {name: value for name, value in kwargs.items() if value is not None}
    if "backend" in asked:
        asked["backend"] = str(asked["backend"]).lower()
    timeout = asked.get("timeout")
    if timeout is not None:
        asked["timeout"] = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if asked["timeout"] <= timedelta(0):
            raise SettingError(f"timeout={timeout} must be longer than nothing", field="timeout", got=timeout)
    asked |= {name: FLAG(name, switch) for name, switch in switches.items() if switch is not None}
    if asked.get("cpu") and asked.get("xla"):
        raise SettingError("cpu=True and xla=True name two devices. Give one of them.", field="xla", got=True)
    return asked


def _build(asked: dict[str, Any]) -> Process:
    environment = read_environment()
    process_group.check_existing(environment)
    debug = asked["debug"] if "debug" in asked else bool(from_env("debug"))
    kind = _kind(asked, environment)
    device = device_of(kind, environment.local_rank)
    make_current(device)
    if environment.world_size == 1:
        return Process(environment, device, DistributedType.NO, None, debug, None, asked)
    backend, groups = _join(environment, kind, asked)
    try:
        collective_checks.switch_checked_mode(groups.control, debug)
    except BaseException:
        process_group.leave(groups, abort=True)
        raise
    environment = _on_nodes(environment, groups.hosts)
    return Process(environment, device, kind.distributed_type, backend, debug, groups, asked)


def _kind(asked: dict[str, Any], environment: ProcessEnvironment) -> DeviceKind:
    if asked.get("cpu"):
        return find_device_kind("cpu")
    if asked.get("xla", environment.launcher == "xla"):
        return find_device_kind("xla")
    if "cpu" in asked or "xla" in asked:  # `cpu=False` means the accelerator, whatever INSTEP_ACCELERATOR says
        return find_device_kind("auto")
    name = from_env("accelerator") or "auto"
    return find_device_kind(name, field=variable_of("accelerator"))


def _on_nodes(environment: ProcessEnvironment, hosts: tuple[str, ...]) -> ProcessEnvironment:
    """Under MPI, which does not number nodes, set `node_rank` and `num_nodes` from the ranks' host names."""
    if environment.launcher not in MPI:
        return environment
    nodes = list(dict.fromkeys(hosts))
    return replace(environment, node_rank=nodes.index(hosts[environment.rank]), num_nodes=len(nodes))


def _join(environment: ProcessEnvironment, kind: DeviceKind, asked: dict[str, Any]) -> tuple[str, process_group.Groups]:
    options = {name: asked[name] for name in _OPTIONS if name in asked}
    if process_group.exists():
        if options:
            raise SettingError(
                f"{', '.join(options)}: the process group exists already, so this cannot be set any more. Give it to "
                f"init_process_group, or let instep make the group."
            )
        return process_group.adopt(environment)
    backend = resolve_backend(options.pop("backend", None), kind, environment)
    return backend, process_group.join(environment, backend, options)


def _compare(asked: dict[str, Any], process: Process) -> None:
    for name, value in asked.items():
        if name == "cpu":
            got: Any = process.asked.get("cpu", process.device.type == "cpu" if value else False)
        elif name == "xla":
            got = process.device.type == "xla"
        elif name == "debug":
            got = process.debug
        elif name == "backend" and process.backend is not None:
            got = value if value in (process.backend, process.backend.rpartition(":")[2]) else process.backend
        else:
            got = process.asked.get(name)
        if got != value:
            shown = f"{name}={got!r}" if got is not None else f"torch's default {name}"
            raise StateError(
                f"PartialState was asked for {name}={value!r}, but this process already holds {shown}. Give the "
                f"argument where the state is first built (the first PartialState, Trainer or Accelerator of the "
                f"program), or call destroy_process_group() before."
            )
