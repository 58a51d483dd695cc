"""The collectives of this process, as torch's flight recorder remembers them: for reports of hangs."""

from __future__ import annotations

import json
from typing import Any

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # where torch has NCCL; any backend, since torch 2.9


def recorded() -> list[dict[str, Any]]:
    """The latest collectives, the oldest first; empty where this torch records none.

    Safe in any thread, while the others wait for a device or another rank.
    """
    from torch._C import _distributed_c10d as c10d  # late: torch.distributed may be missing

    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        if hasattr(c10d, name):
            entries += json.loads(getattr(c10d, name)(True, False)).get("entries", [])
    unique = {(entry["pg_id"], entry["record_id"], entry["profiling_name"]): entry for entry in entries}
    return sorted(unique.values(), key=lambda entry: entry["time_created_ns"])


def described(entry: dict[str, Any]) -> str:
    """A collective in words.

    Example:
        >>> described({"profiling_name": "gloo:all_reduce", "collective_seq_id": 7, "process_group": ["0", "default"],
        ...     "input_sizes": [[10]], "input_dtypes": ["Float"]})
        'gloo:all_reduce no. 7 of group default, Float[10]'
    """
    sizes = zip(entry.get("input_dtypes", ()), entry.get("input_sizes", ()), strict=False)
    tensors = ", ".join(f"{dtype}{size}" for dtype, size in sizes)
    group = entry["process_group"][-1]
    return f"{entry['profiling_name']} no. {entry['collective_seq_id']} of group {group}, {tensors}"
