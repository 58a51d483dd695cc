"""Memory for a model: the free memory of accelerators and of this machine, and the user's limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from instep.errors import SettingError
from instep.state import DEVICE_KINDS
from instep.utils.checks import is_int, parse_size, wrong
from instep.utils.imports import require
from instep.utils.warn import warn_user

Memory = Mapping[Any, int | str]  # bytes by device; the keys are `Any`, since the key type of a mapping is invariant
_NUMBERED = ("cuda", "xpu", "hpu", "npu")  # kinds of accelerators, whose devices a device map calls 0, 1, ...
_NAMED = ("mps", "cpu", "disk")
_CGROUPS = Path("/sys/fs/cgroup")
# For each cgroup version: subfolder of the mount, files with the limits, file with the number of used bytes, and
# entries of memory.stat that count bytes that can be freed.
_CGROUP_FILES = {
    "": ("", ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    "memory": (
        "memory",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def get_max_memory(max_memory: Memory | None = None) -> dict[int | str, int]:
    """Return the bytes that a model may take on each device, accelerators first.

    Args:
        max_memory: bytes, or texts such as "10GB" and "1GiB", by device: accelerators by number, "mps", "cpu" and
            "disk". A device that is left out is not used, except for the disk, which then has no limit. None: the
            memory that is free now on this machine's accelerators and in its memory, within the limits of its
            container.

    Raises:
        SettingError: a device is unknown, or a value is not a size.

    Example:
        >>> get_max_memory({"cpu": "2GB", 1: "1GiB", 0: 10**9})
        {0: 1000000000, 1: 1073741824, 'cpu': 2000000000}

    Source: the name and the order are Accelerate's.
    """
    if max_memory is None:
        return _free_memory()
    if not isinstance(max_memory, Mapping):
        raise wrong("max_memory", max_memory, "a dict of bytes by device, such as {0: '10GB', 'cpu': '30GB'}")
    for device in max_memory:
        if not is_int(device, 0) and device not in _NAMED:
            raise SettingError(
                f"max_memory: the device {device!r} is not known. Name accelerators by their number (0, 1, ...), and "
                f"use {', '.join(map(repr, _NAMED))} for the others.",
                field="max_memory",
                got=device,
            )
    sizes = {device: parse_size(f"max_memory[{device!r}]", size, least=0) for device, size in max_memory.items()}
    order = [*sorted(device for device in sizes if not isinstance(device, str)), *_NAMED]
    return {device: sizes[device] for device in order if device in sizes}


def accelerator_name() -> str | None:
    """Return torch's name for the accelerators that device maps call 0, 1, ...; None if there are none."""
    return next((name for name in _NUMBERED if DEVICE_KINDS[name].count()), None)


def _free_memory() -> dict[int | str, int]:
    name = accelerator_name() or "cuda"
    module: Any = getattr(torch, name)
    free: dict[int | str, int] = {}
    shared = False
    for index in range(DEVICE_KINDS[name].count()):
        try:
            free[index] = module.mem_get_info(index)[0]
        except RuntimeError as error:  # another process has exclusive use of the device, or the device is broken
            warn_user(f"{name}:{index} is left out, its memory cannot be asked for: {error}")
            continue
        if hasattr(module, "memory_reserved"):  # memory that torch has cached for this process's tensors is free too
            free[index] += module.memory_reserved(index) - module.memory_allocated(index)
        shared |= bool(getattr(module.get_device_properties(index), "is_integrated", False))
    if DEVICE_KINDS["mps"].count():
        return {"mps": max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())}
    # An accelerator inside the processor shares main memory, so the same bytes must not count twice.
    return free if shared else {**free, "cpu": available_memory()}


def available_memory() -> int:
    """Return the bytes of main memory that this process can get without swapping, within its container's limits."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except OSError:  # only Linux has this file
        psutil: Any = require("psutil", extra="monitor", purpose="the free memory of this machine")
        return psutil.virtual_memory().available
    return max(0, min([available, *_left_in_cgroups()]))


def _left_in_cgroups(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield the free bytes of each control group of this process that has a limit."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers not in _CGROUP_FILES:
            continue
        below, limits, use, cache = _CGROUP_FILES[controllers]
        group = root / below / path.strip("/")
        # In a container, the path may be the host's path while the mount is the container's, so some folders may not
        # exist.
        for folder in (group, *group.parents):
            try:
                used = int((folder / use).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                texts = [(folder / name).read_text().strip() for name in limits]
            except OSError:
                continue
            used -= sum(int(stat.get(name, 0)) for name in cache)
            yield from (int(text) - used for text in texts if text != "max")
            if folder == root / below:
                break
