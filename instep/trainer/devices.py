"""Processes and devices of a Trainer: count and launch processes, choose their devices, set torch's global switches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import torch

from instep.errors import SettingError
from instep.health.error_report import AGENT_PID, report_failures, under_plain_torchrun
from instep.state import PartialState, ProcessEnvironment, find_device_kind, read_environment
from instep.state.device import DeviceKind, make_current, visible
from instep.state.environment import MIN_NODES, read_number
from instep.state.process import is_held
from instep.trainer.settings import Settings
from instep.utils.env import as_variables, from_env
from instep.utils.warn import warn_user

TORCHRUN_GRACE_S = 25.0
CHOSEN = "INSTEP_DEVICES"  # environment variable with the devices that a launch gave to its ranks


def count_devices(settings: Settings, environment: ProcessEnvironment) -> int:
    """Count the processes of the run on this machine.

    Raises:
        SettingError: the launcher started more or fewer processes than the settings ask for, or a requested device
            does not exist.
    """
    devices, kind = settings.devices, find_device_kind(settings.accelerator)
    launched = environment.launcher != "none"
    if devices == "auto":
        count = environment.local_world_size if launched else 1 if kind.name == "cpu" else kind.count()
    elif isinstance(devices, tuple):
        _check_indices(devices, kind, launched)
        count = len(devices)
    else:
        count = kind.count() if devices == -1 else int(devices)
    wanted = count * settings.num_nodes
    if launched and wanted != environment.world_size:
        nodes = "" if settings.num_nodes == 1 else f" and num_nodes={settings.num_nodes}"
        if devices == "auto" and settings.num_nodes == 1 and environment.num_nodes > 1:
            hint = f"set num_nodes={environment.num_nodes}"
        else:
            hint = f"start {wanted} process{'es' if wanted > 1 else ''}, or leave devices out"
        raise SettingError(
            f"devices={devices!r}{nodes} is a world size of {wanted}, but the launcher started "
            f"{environment.world_size}: {hint}.",
            field="devices",
            got=devices,
        )
    return count


def on_nodes_there(settings: Settings, environment: ProcessEnvironment) -> Settings:
    """Return the settings with the current number of nodes if the job is elastic (`num_nodes` is then the maximum)."""
    least = read_number(os.environ, MIN_NODES, 0)
    if least and environment.launcher == "torchrun" and least <= environment.num_nodes <= settings.num_nodes:
        return replace(settings, num_nodes=environment.num_nodes)
    return settings


def launch(settings: Settings, count: int, command: tuple[str, ...] | None = None) -> NoReturn:
    """Launch `count` ranks, wait for them as their agent, and exit with their exit code.

    The ranks run `command`; if it is None, they run this program again.
    """
    # Imported late: only a launch needs it.
    from instep.launch import hydra
    from instep.launch.command import this_command
    from instep.launch.engine import run, spec_for_nodes

    command, told = hydra.join_job(command or this_command())
    if (folder := hydra.started_in()) is not None:
        os.chdir(folder)
    # `grace_period` reads this variable in the ranks
    env = told | as_variables({"grace_period_s": settings.grace_period_s})
    if isinstance(settings.devices, tuple):
        env |= {"CUDA_VISIBLE_DEVICES": visible(settings.devices), CHOSEN: ",".join(map(str, settings.devices))}
    sys.exit(run(spec_for_nodes(count, settings.num_nodes, command, env, settings.grace_period_s)))


def grace_period(settings: Settings, rank: int) -> float:
    """Return how many seconds after a signal this process is killed, if it has not saved and ended before.

    Warn on rank 0 if this is less than the `grace_period_s` that the user has set.
    """
    asked_s = settings.grace_period_s
    if under_plain_torchrun():
        given_s = TORCHRUN_GRACE_S
        why = "torchrun kills its ranks 30 s after a signal. `instep launch --grace-period-s` gives them all of it"
    elif AGENT_PID in os.environ and (told_s := from_env("grace_period_s")) is not None:
        given_s, why = told_s, f"they were launched with {told_s:g}. Give as many to `instep launch --grace-period-s`"
    else:
        return asked_s
    if asked_s <= given_s:
        return asked_s
    if asked_s != Settings.grace_period_s and rank == 0:
        warn_user(f"grace_period_s={asked_s:g}: ranks have {given_s:g} s to save, since {why}.")
    return given_s


def _check_indices(devices: tuple[int, ...], kind: DeviceKind, launched: bool) -> None:
    if launched:
        if os.environ.get(CHOSEN) == ",".join(map(str, devices)):
            return
        problem = (
            "the launcher has given each process its device already. Choose with "
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))} where it is started, and give devices={len(devices)}"
        )
    elif max(devices) >= kind.count():
        problem = f"this process sees {kind.count()} {kind.name} devices, numbered from 0"
    elif len(devices) > 1 and kind.name != "cuda":
        problem = (
            f"several devices can be chosen for cuda, and this is {kind.name}. Hide the others from the program, and "
            f"give devices={len(devices)}"
        )
    else:
        return
    raise SettingError(f"devices={list(devices)}: {problem}.", field="devices", got=devices)


def connect(settings: Settings) -> PartialState:
    """Connect this process to the other processes of the run, and return its `PartialState`.

    Raises:
        SettingError: the process already runs on another kind of device.
    """
    if read_environment().launcher != "none":
        report_failures()
    wanted = find_device_kind(settings.accelerator).name
    # If this call creates the process's PartialState, the Trainer's choice takes precedence over INSTEP_ACCELERATOR.
    cpu = True if wanted == "cpu" else None if is_held() else False
    process = PartialState(cpu=cpu, xla=True if wanted == "xla" else None)
    if process.device.type != wanted:
        raise SettingError(
            f"accelerator={settings.accelerator!r} means {wanted} here, but this process runs on "
            f"{process.device.type}, as its first Trainer or PartialState chose. Use one kind of device in a program.",
            field="accelerator",
            got=settings.accelerator,
        )
    return process


def device_of(settings: Settings, process: PartialState, environment: ProcessEnvironment) -> torch.device:
    """Make this process's device the current one, and return it.

    Without a launcher, `devices=[1]` means the second device that this process sees.
    """
    if isinstance(settings.devices, tuple) and environment.launcher == "none":
        device = torch.device(process.device.type, settings.devices[0])
        make_current(device)
        return device
    return process.device


def make_cublas_repeatable(settings: Settings, kind: str) -> None:
    """Set the cuBLAS variable that torch needs for deterministic algorithms on CUDA, unless the user has set it.

    The variable stays set after the run, as in Lightning. cuBLAS and torch read it when the first matrix is multiplied,
    so the constructor of the Trainer sets it.
    """
    if settings.deterministic and kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def torch_flags(settings: Settings) -> Iterator[None]:
    """Set torch's global switches, such as deterministic algorithms, for a run, and restore them after it."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, anomaly = torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
    if settings.benchmark is not None:
        torch.backends.cudnn.benchmark = settings.benchmark
    if settings.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.autograd.set_detect_anomaly(anomaly)
        torch.set_grad_enabled(grad)
