"""Where a Trainer runs: how many processes, who starts them, and which device is whose."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch

from instep.errors import SettingError
from instep.state import PartialState, ProcessEnvironment, find_device_kind, read_environment
from instep.trainer.settings import Settings


def count_devices(settings: Settings, environment: ProcessEnvironment) -> int:
    """Processes on this machine.

    Raises:
        SettingError: the launcher started another number.
    """
    devices, kind = settings.devices, find_device_kind(settings.accelerator)
    launched = environment.launcher != "none"
    if devices == "auto":
        count = environment.local_world_size if launched else 1 if kind.name == "cpu" else kind.count()
    elif isinstance(devices, tuple):
        count = len(devices)
    else:
        count = kind.count() if devices == -1 else int(devices)
    wanted = count * settings.num_nodes
    if launched and wanted != environment.world_size:
        nodes = "" if settings.num_nodes == 1 else f" and num_nodes={settings.num_nodes}"
        if devices == "auto" and settings.num_nodes == 1 and environment.num_nodes > 1:
            hint = f"set num_nodes={environment.num_nodes}"
        else:
            hint = f"start {wanted} processes, or leave devices out"
        raise SettingError(
            f"devices={devices!r}{nodes} is {wanted} processes, but the launcher started {environment.world_size}: "
            f"{hint}.",
            field="devices",
            got=devices,
        )
    return count


def launch(settings: Settings, count: int) -> NoReturn:
    """Become the agent of `count` ranks that run this program again, and exit as they end."""
    # Late: only a launch pays for it.
    from instep.launch.command import this_command
    from instep.launch.engine import run, spec_for_nodes

    indices = settings.devices if isinstance(settings.devices, tuple) else ()
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))} if indices else {}
    sys.exit(run(spec_for_nodes(count, settings.num_nodes, this_command(), env)))


def connect(settings: Settings) -> PartialState:
    """This process's state; with several processes they meet here."""
    if read_environment().launcher != "none":
        from instep.launch.report import report_failures  # late: only ranks need it

        report_failures()
    return PartialState(cpu=True) if find_device_kind(settings.accelerator).name == "cpu" else PartialState()


def device_of(settings: Settings, process: PartialState, environment: ProcessEnvironment) -> torch.device:
    """This process's device; `devices=[1]` in a process that nobody launched means the second one."""
    if isinstance(settings.devices, tuple) and environment.launcher == "none":
        return torch.device(process.device.type, settings.devices[0])
    return process.device
