"""Import deepspeed for a type of device, and detect killed builds of its operators.

DeepSpeed compiles operators for GPUs and for offloading (to the CPU or to NVMe) when they are first used. During a
build, torch keeps a file `lock`, which does not say which process made it. If the process is killed, the file stays,
and every later run would wait for it forever without a message.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from instep.errors import DistributedError, SettingError
from instep.state import PartialState
from instep.utils.imports import require

_YOUNG_S = 5.0  # longest time from making the lock file to starting the compiler
_REMOTE_S = 1800.0  # longest time of a build on another machine


def load_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed, and configure it for a type of device.

    Raises:
        MissingPackageError: deepspeed is not installed.
        SettingError: this process has configured deepspeed for another type of device.
        DistributedError: a build of one of its operators was killed.
    """
    chosen = os.environ.get("DS_ACCELERATOR")
    try:
        os.environ["DS_ACCELERATOR"] = device.type  # DeepSpeed reads the variable at its import
        with quiet_imports():
            deepspeed = require("deepspeed", extra="deepspeed", purpose="DeepSpeedStrategy")
    finally:
        os.environ.pop("DS_ACCELERATOR") if chosen is None else os.environ.update(DS_ACCELERATOR=chosen)
    kind = torch.device(deepspeed.accelerator.get_accelerator().device_name()).type
    if kind != device.type:
        raise SettingError(
            f"deepspeed was imported before, for {kind!r}, and this run is on {device.type!r}. Set the environment "
            f"variable DS_ACCELERATOR={device.type} before the first import.",
            field="accelerator",
            got=device.type,
        )
    check_builds(build_folder())
    # Do not build DeepSpeed's shared-memory collectives for CPUs, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _forget_old_groups(deepspeed.utils.groups)
    return deepspeed


def _forget_old_groups(groups: Any) -> None:
    """Remove process groups from DeepSpeed's global state if they have been destroyed, as by `end_training`."""
    try:
        if groups._WORLD_GROUP is not None:
            torch.distributed.get_global_rank(groups._WORLD_GROUP, 0)
    except ValueError:  # newer versions of torch raise for a destroyed group
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        groups._ALL_TO_ALL_GROUP = {}


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Ignore the deprecation warning of `torch.jit.script`, which DeepSpeed uses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        yield


def build_folder() -> Path:
    """Return the folder in which torch builds C++ extensions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    # Imported late, since torch's module searches for compilers when it is imported.
    return Path(chosen or import_module("torch.utils.cpp_extension").get_default_build_root())


def check_builds(folder: Path) -> None:
    """Raise an error if the build of one of DeepSpeed's operators was killed.

    Args:
        folder: folder that contains a folder for each build.

    Raises:
        DistributedError: a build was killed; the message names the file to remove.
    """
    for lock in sorted((*folder.glob("*/lock"), *folder.glob("*/*/lock"))):
        try:
            age_s = time.time() - lock.stat().st_mtime
        except OSError:
            continue  # the lock file is gone: the build has just ended
        remote = PartialState().num_nodes > 1
        if _is_at_work(lock.parent) or age_s < (_REMOTE_S if remote else _YOUNG_S):
            continue
        raise DistributedError(
            f"a build of the operator {lock.parent.name!r} was killed {age_s / 60:.0f} minutes ago and left its lock "
            f"behind: DeepSpeed would wait for it for ever. If no other machine builds there now, remove it: "
            f"rm {lock}\nBuild operators before a job starts, in one process: ds_report lists them, and "
            'python -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()" builds one.'
        )


def _is_at_work(folder: Path) -> bool:
    """Return True if a process on this machine works in this folder, as the compiler of a build does."""
    try:
        target = folder.stat()
    except OSError:
        return False
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = (process / "cwd").stat()
        except OSError:
            continue
        if (here.st_dev, here.st_ino) == (target.st_dev, target.st_ino):
            return True
    return not Path("/proc").is_dir()  # unknown without /proc: assume a running build
