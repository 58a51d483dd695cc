"""The device of the tests marked `gpu`, and their rehearsal on a machine without one.

With INSTEP_GPU_REHEARSAL=1 and no device the tests marked `gpu` run on the CPU, so that a wrong name in one of them is
found there. What a CPU does not have is stood in for by the functions here. Each stand-in that was used is added to
the JSON list in the file that INSTEP_GPU_STAND_INS names, so that nobody takes a rehearsal for a run on a device.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REHEARSES = DEVICE == "cpu" and os.environ.get("INSTEP_GPU_REHEARSAL") == "1"
ON_DEVICE: dict[str, Any] = {"accelerator": "gpu" if DEVICE == "cuda" else "cpu", "devices": 1}
"""Arguments of a Trainer that trains on the device."""


IN_A_MAP: Any = 0 if DEVICE == "cuda" else "cpu"
"""The device's name in a device map."""


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
"""Mark of a test that is left out on one device, and of the rehearsal."""


def stand_in(what: str) -> None:
    """Record that something stands in for a call of the device, or that something is not judged."""
    path = os.environ.get("INSTEP_GPU_STAND_INS")
    if not path:
        return
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "[]")
        if what not in known:
            file.truncate(0)
            json.dump([*known, what], file)


def on_device(what: str) -> bool:
    """Return whether an assertion that only a device can meet is to be made; else record that it is not judged."""
    if DEVICE == "cpu":
        stand_in(f"{what} is not judged")
    return DEVICE == "cuda"


def needs(what: str) -> pytest.MarkDecorator:
    """Return the mark that leaves a test out of the rehearsal, for what the CPU lacks."""
    return pytest.mark.skipif(REHEARSES, reason=f"not rehearsed: the CPU has no {what}")


def allow_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a Trainer precision="16-mixed" in this test on a CPU too, with the scaler that a device would have."""
    if DEVICE == "cuda":
        return
    from instep.strategies import precision  # late: every test would load them
    from instep.trainer import settings

    stand_in("precision='16-mixed' on a CPU, where a run refuses it")
    check = precision.check_device
    for module in (precision, settings):
        monkeypatch.setattr(module, "check_device", lambda name, device: name == "16-mixed" or check(name, device))


def current_stream() -> Any:
    """Return the current stream."""
    if DEVICE == "cuda":
        return torch.cuda.current_stream()
    stand_in("torch.cuda.current_stream: one that does everything at once")
    return _STREAM


_STREAM = SimpleNamespace(name="the CPU's")


def event() -> Any:
    """Make an event, which has `record`, `query` and `synchronize`."""
    if DEVICE == "cuda":
        return torch.cuda.Event()
    stand_in("torch.cuda.Event: one that is always over")
    return SimpleNamespace(record=lambda: None, query=lambda: True, synchronize=lambda: None)


def pinned(tensor: Tensor) -> Tensor:
    """Copy a tensor into pinned memory."""
    if DEVICE == "cuda":
        return tensor.pin_memory()
    stand_in("pinned memory: memory as it is")
    return tensor.clone()


def keep_busy(seconds: float) -> None:
    """Keep the current stream busy for about so many seconds; the host does not wait for it."""
    if DEVICE == "cuda":
        torch.cuda._sleep(int(seconds * 1.7e9))  # clock cycles; an H100 has up to 1.98e9 in a second
    else:
        stand_in("torch.cuda._sleep: nothing")


def begin_no_waiting() -> None:
    """Raise an error where the host waits for the device, until `end_no_waiting`."""
    if DEVICE == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once in a process that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
    else:
        stand_in("torch.cuda.set_sync_debug_mode: nothing")


def end_no_waiting() -> None:
    """Allow the host to wait for the device again."""
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")


def cached_bytes() -> int:
    """Return the bytes of the device that torch holds for this process."""
    return torch.cuda.memory_reserved() if DEVICE == "cuda" else 0


def memory_bytes() -> int:
    """Return the bytes of the device that tensors take, or took where another stream may still use them."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["active_bytes.all.current"]
    stand_in("torch.cuda.memory_stats: 0")
    return 0
