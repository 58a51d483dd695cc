"""Table of the kinds of devices, with torch's name and collective backend, and functions to choose a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from instep.errors import SettingError, one_of
from instep.types import Word


class DistributedType(Word):
    """Kind of a run's processes: a single process, or several on one kind of device.

    The members after XLA are names of Accelerate, for scripts that compare with them. instep does not support their
    devices, or shows the name of the strategy elsewhere. Only the `AcceleratorState` of `instep.compat` uses one of
    them: FSDP, for sharded models.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NPU = "MULTI_NPU"
    XLA = "XLA"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_SDAA = "MULTI_SDAA"


@dataclass(frozen=True)
class DeviceKind:
    """Facts about one kind of device.

    Args:
        name: torch's device type, and instep's name for the kind.
        backend: collective backend for processes with such devices; None if torch has none.
        distributed_type: `DistributedType` of a job of several processes with such devices.
        count: function that returns the number of such devices that this process sees; 0 if the kind cannot be used
            here.
        extension: module that adds the backend to torch; None if torch includes the backend.
    """

    name: str
    backend: str | None
    distributed_type: DistributedType
    count: Callable[[], int]
    extension: str | None = None


def _count(name: str) -> Callable[[], int]:
    def count() -> int:
        module = getattr(torch, name, None)
        return module.device_count() if module is not None and module.is_available() else 0

    return count


def _xla_count() -> int:
    return int(find_spec("torch_xla") is not None)


KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind("cuda", "nccl", DistributedType.MULTI_GPU, _count("cuda")),
        DeviceKind("xpu", "xccl", DistributedType.MULTI_XPU, _count("xpu")),
        DeviceKind("hpu", "hccl", DistributedType.MULTI_HPU, _count("hpu"), "habana_frameworks.torch.distributed.hccl"),
        DeviceKind("npu", "hccl", DistributedType.MULTI_NPU, _count("npu"), "torch_npu"),
        DeviceKind("mps", None, DistributedType.NO, lambda: int(torch.backends.mps.is_available())),
        DeviceKind("xla", "xla", DistributedType.XLA, _xla_count, "torch_xla.distributed.xla_backend"),
        DeviceKind("cpu", "gloo", DistributedType.MULTI_CPU, lambda: 1),
    )
}
"""Kinds of devices that instep knows: a `DeviceKind` by the name of each."""
# "auto" never chooses xla, since an installed torch_xla does not mean that its device should be used.
_AUTO = ("cuda", "xpu", "hpu", "npu", "mps", "cpu")
_GPU = ("cuda", "xpu", "mps")


def find_device_kind(accelerator: str = "auto", field: str = "accelerator") -> DeviceKind:
    """Find the kind of device for an accelerator's name.

    Args:
        accelerator: "cpu", "cuda", "mps", "xpu", "hpu", "npu", "xla"; "gpu" for the first available one of cuda, xpu
            and mps; "auto" for the first available kind except xla, the CPU last.
        field: name of the argument that names the accelerator, for errors.

    Raises:
        SettingError: the name is unknown, or this process sees no such device.

    Example:
        >>> find_device_kind("cpu").backend
        'gloo'
    """
    if accelerator in ("auto", "gpu"):
        found = next((KINDS[name] for name in (_AUTO if accelerator == "auto" else _GPU) if KINDS[name].count()), None)
    elif accelerator in KINDS:
        found = KINDS[accelerator] if KINDS[accelerator].count() else None
    else:
        raise one_of(field, accelerator, ("auto", "gpu", *KINDS))
    if found is None:
        here = ", ".join(name for name, kind in KINDS.items() if kind.count())
        raise SettingError(
            f"{field}={accelerator!r}: this process sees no such device. It sees: {here}.{_why_none(accelerator)}",
            field=field,
            got=accelerator,
        )
    return found


def _why_none(accelerator: str) -> str:
    """Explain why this process sees no device of a kind, as far as torch and the environment show, and what to do."""
    version = torch.__version__
    otherwise = "Else use accelerator='cpu'."
    if accelerator in ("cuda", "gpu"):
        if torch.version.cuda is None and torch.version.hip is None:
            others = {"xpu": "xpu" in version, "mps": torch.backends.mps.is_built()}
            if accelerator == "cuda" or not any(others.values()):
                return (
                    f" This torch, {version}, is a build without CUDA: install the one for your driver, by the command "
                    f"that https://pytorch.org/get-started/locally shows. {otherwise}"
                )
        elif os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
            return f" CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides them. {otherwise}"
        return f" Look whether the driver sees one (nvidia-smi, rocm-smi). {otherwise}"
    if accelerator == "mps" and not torch.backends.mps.is_built():
        return f" This torch, {version}, is a build without MPS, which is for Macs with Apple's chips. {otherwise}"
    if accelerator == "xla":
        return f" torch_xla is not installed: pip install torch_xla. {otherwise}"
    if KINDS.get(accelerator) is not None and KINDS[accelerator].extension and accelerator != "xla":
        return f" It needs the vendor's package for torch beside it. {otherwise}"
    return f" {otherwise}"


def device_of(kind: DeviceKind, local_rank: int) -> torch.device:
    """Choose the device of one process of a node.

    Args:
        kind: kind of the device.
        local_rank: number of the process on its node. A process that sees only one device, because its launcher hides
            the others, gets this device.

    Raises:
        SettingError: there are fewer devices than processes on this node.
    """
    if kind.name in ("cpu", "mps"):
        return torch.device(kind.name)
    count = kind.count()
    if count > 1 and local_rank >= count:
        raise SettingError(
            f"local rank {local_rank} has no {kind.name} device: this node has {count} of them. Start at most {count} "
            f"processes on this node, or use the CPU.",
            field="local_rank",
            got=local_rank,
        )
    return torch.device(kind.name, local_rank if count > 1 else 0)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype for sums that must keep all digits: float64, or float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def visible(indices: Iterable[int]) -> str:
    """Return a value of CUDA_VISIBLE_DEVICES that selects some of the devices that this process sees."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(seen[index] if seen else str(index) for index in indices)


def make_current(device: torch.device) -> None:
    """Make a device the current device of its kind, if torch has a current device for this kind."""
    module = getattr(torch, device.type, None)
    if device.index is not None and module is not None and hasattr(module, "set_device"):
        module.set_device(device)
