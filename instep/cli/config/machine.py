"""What a config file says of this machine by default."""

from __future__ import annotations

from typing import Any

from instep.state import DEVICE_KINDS, find_device_kind


def found() -> dict[str, Any]:
    """The kind and number of this machine's devices; one process on a CPU."""
    kind = find_device_kind("auto")
    return {"accelerator": kind.name, "devices": 1 if kind.name == "cpu" else kind.count()}


def kinds() -> list[str]:
    """The kinds of device that are here, the best first."""
    return [name for name, kind in DEVICE_KINDS.items() if kind.count()]
