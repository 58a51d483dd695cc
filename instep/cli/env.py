"""Print versions, devices, free memory and the settings that a launch on this machine has, for a bug report.

Values of variables and settings whose names look like secrets are hidden.

Examples:
  instep env
  instep env --json > env.json
  instep env --config fsdp
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from instep import __version__
from instep.cli import output
from instep.cli.config import CONFIG_HELP, as_json, print_settings
from instep.config.layers import resolve
from instep.utils.redact import hide

_PACKAGES = (
    "torch", "numpy", "safetensors", "rich", "tensorboard", "wandb", "deepspeed", "torchdata", "torchao", "torch_xla",
    "transformers", "ray", "mlflow", "lightning", "accelerate",
)  # fmt: skip
# Environment variables that affect a launch and its collectives, including instep's own variables.
_VARIABLES = re.compile(
    r"INSTEP_|NCCL_|GLOO_|TORCH_|TORCHELASTIC_|OMP_|MKL_NUM|CUDA_|SLURM_(JOB|STEP|PROC|N|LOCAL)|OMPI_COMM_WORLD_|PMI_"
    r"|PJRT_|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT)$"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("--config", metavar="FILE", help=f"{CONFIG_HELP}, or a template")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print versions, devices, variables and settings."""
    launch = resolve(config=args.config)
    versions, devices, variables = dict(_versions()), list(_devices()), _variables()
    if args.json:
        settings = {"file": launch.file, "settings": as_json(launch)}
        output.say_json({"versions": versions, "devices": devices, "variables": variables, **settings})
        return 0
    output.table(("what", "version"), versions.items())
    output.say()
    rows = [
        (device["device"], device["name"], *(output.size(device[key]) for key in ("memory_bytes", "free_bytes")))
        for device in devices
    ]
    output.table(("device", "name", "memory", "free"), rows, right=("memory", "free"))
    output.say()
    if variables:
        output.table(("variable", "value"), variables.items())
        output.say()
    output.say(f"config file: {launch.file or 'none'}")
    print_settings(launch, explain=False)
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    import torch  # imported late, since this takes seconds

    yield "instep", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", platform.platform()
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        yield "cuda", torch.version.cuda
        if torch.distributed.is_nccl_available():
            from torch.cuda import nccl  # imported late, since it is slow to import

            yield "nccl", ".".join(map(str, nccl.version()))


def _devices() -> Iterator[dict[str, Any]]:
    import torch  # imported late, since it is slow to import

    from instep.state import DEVICE_KINDS

    total, free = _main_memory()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    name = f"{_processor()}, {cores} cores for this process"
    yield {"device": "cpu", "name": name, "memory_bytes": total, "free_bytes": free}
    for kind in DEVICE_KINDS.values():
        module = getattr(torch, kind.name, None)
        for index in range(kind.count() if kind.name != "cpu" else 0):
            entry: dict[str, Any] = {"device": f"{kind.name}:{index}", "name": kind.name}
            entry |= {"memory_bytes": None, "free_bytes": None}
            if module is not None and hasattr(module, "get_device_name"):
                entry["name"] = module.get_device_name(index)
            if module is not None and hasattr(module, "mem_get_info"):
                entry["free_bytes"], entry["memory_bytes"] = module.mem_get_info(index)
            yield entry


def _main_memory() -> tuple[int | None, int | None]:
    """Return the bytes of all memory, and of the part that programs can still get (None if unknown)."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return tuple(int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))  # pyright: ignore
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _variables() -> dict[str, str]:
    return hide({name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)})
