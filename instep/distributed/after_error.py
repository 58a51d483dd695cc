"""Helpers after an error: tests whether the device works and whether all ranks arrive, and a group of one rank."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import irecv, isend

from instep.distributed.rank_zero import RankGroup
from instep.state import PartialState

if TYPE_CHECKING:
    from torch.distributed import Work


class Alone(RankGroup):
    """Group of this process alone, for a save after the other ranks have ended."""

    def rank_and_size(self) -> tuple[int, int]:
        return 0, 1


# Tags that no other message has, so that a rank in other code never receives these messages by mistake.
_HERE, _ALL_HERE = 7_301, 7_302


def is_device_error(error: BaseException) -> bool:
    """Return True if an error comes from the device, in torch or in a kernel of another library.

    Example:
        >>> is_device_error(RuntimeError("CUDA error: device-side assert triggered")), is_device_error(OSError())
        (True, False)
    """
    text = str(error)
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and ("CUDA error" in text or "Error [CUDA]" in text)
    )


def device_failed(error: BaseException, device: torch.device) -> bool:
    """Return True if the device fails at every call since an error such as an illegal memory access.

    The device is tested only if the error came from it: a device that works may be busy with a collective, and the test
    would wait for a rank that will not come.

    Args:
        error: error that ended the run.
        device: device on which the run computed.
    """
    if not is_device_error(error) or device.type not in ("cuda", "xpu", "cpu"):
        return False
    module: Any = getattr(torch, device.type)
    try:
        module.synchronize(device)
    except RuntimeError:
        return True
    return False


def all_arrive(timeout_s: float) -> bool:
    """Return True if every rank calls this within `timeout_s` seconds. No rank waits much longer.

    `monitored_barrier` is not used, since all ranks but the first would wait for the group's time-out of half an hour.
    If the result is False, the control group cannot be used any more.
    """
    group = PartialState().control_group
    if group is None:
        return True
    deadline_s = time.monotonic() + timeout_s
    word = torch.zeros(1)
    try:
        if group.rank() != 0:
            _finish(isend(word, 0, group, _HERE), deadline_s)
            # wait one second more, since the first rank's clock may be behind
            _finish(irecv(word, 0, group, _ALL_HERE), deadline_s + 1.0)
            return True
        for each in [irecv(torch.zeros(1), rank, group, _HERE) for rank in range(1, group.size())]:
            _finish(each, deadline_s)
        for each in [isend(word, rank, group, _ALL_HERE) for rank in range(1, group.size())]:
            _finish(each, deadline_s + 1.0)
    except RuntimeError:
        return False
    return True


def _finish(work: Work | None, deadline_s: float) -> None:
    assert work is not None, "this rank is one of the group"
    work.wait(timedelta(seconds=max(0.01, deadline_s - time.monotonic())))
