"""What all open pages share: the runs, their curves, and the machine. Everything here runs in threads."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from instep.runs import MetricsReader, Run, find_runs
from instep.utils.imports import require

Result = TypeVar("Result")
FRESH_S = 1.5
"""How old the list of runs may be: pages that are open at the same time read the folders once."""
POINTS = 600
"""Of a curve: as many as a plot has pixels."""
_READERS = 64
_DEVICE = ("DeviceStatsMonitor.", "ThroughputMonitor.", "system/")


class Source:
    """Runs below a folder, read again as they grow.

    Args:
        folder: a run, or a folder that has runs in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._runs: list[Run] = []
        self._searched = -FRESH_S
        self._lock = threading.Lock()
        self._readers: OrderedDict[Any, tuple[threading.Lock, MetricsReader]] = OrderedDict()
        self._verified: OrderedDict[Any, list[dict[str, Any]]] = OrderedDict()

    def runs(self) -> list[Run]:
        """List the runs, the newest first."""
        with self._lock:
            if time.monotonic() - self._searched >= FRESH_S:
                self._runs = find_runs(self.folder, self._runs)
                self._searched = time.monotonic()
            return self._runs

    def last_values(self, run: Run) -> dict[str, tuple[int, float]]:
        """Read how many points each metric of a run has, and its last value; no curve is kept."""
        metrics = self._read(run, None, 2)
        return {name: (curve.count, curve.last) for name, curve in metrics.curves.items()}

    def curves(self, run: Run, names: frozenset[str]) -> dict[str, Any]:
        """Read some curves of a run, with as many points as are shown."""
        return self._read(run, names, POINTS).curves if names else {}

    def problems(self, run: Run) -> list[str]:
        """List what of a run cannot be read."""
        return [*run.problems, *self._read(run, None, 2).problems]

    def device_names(self, run: Run) -> list[str]:
        """List the metrics of the hardware that a run logged."""
        return [name for name in self.last_values(run) if name.startswith(_DEVICE)]

    def checkpoints(self, run: Run) -> list[dict[str, Any]]:
        """List the checkpoints of a run, with what `verify` found for those that are the same since."""
        return self._verified.get((run.folder, run.stamp)) or run.checkpoints()

    def verify(self, run: Run) -> None:
        """Hold every byte of a run's checkpoints against its checksum."""
        _keep(self._verified, (run.folder, run.stamp), lambda: run.checkpoints(verify=True))

    def _read(self, run: Run, names: frozenset[str] | None, points: int) -> Any:
        def make() -> tuple[threading.Lock, MetricsReader]:
            return threading.Lock(), MetricsReader(run.folder, None if names is None else sorted(names), points)

        with self._lock:
            lock, reader = _keep(self._readers, (run.folder, names), make)
        with lock:
            return reader.read()


async def in_thread(work: Callable[..., Result], *args: Any) -> Result:
    """Do something slow beside the server; Ctrl-C does not wait for it."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except Exception as error:  # noqa: BLE001  it is raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="instep-dashboard", daemon=True).start()
    return await asyncio.wrap_future(future)


def _keep(kept: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return what is kept, or make it; the oldest one goes where there are many."""
    if key not in kept:
        kept[key] = make()
        while len(kept) > _READERS:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]


def look_at_machine(folder: Path) -> list[tuple[str, float, str]]:
    """Measure the machine now.

    Returns:
        A name, the part in use from 0 to 1, and the numbers as text: processor, memory, disk, then each GPU.
    """
    psutil: Any = require("psutil", extra="dashboard", purpose="instep dashboard")
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(folder)
    load = psutil.cpu_percent() / 100
    return [
        ("Processor", load, f"{load:.0%} of {psutil.cpu_count()} cores"),
        ("Memory", memory.percent / 100, f"{_gib(memory.total - memory.available)} of {_gib(memory.total)}"),
        ("Disk", disk.used / disk.total, f"{_gib(disk.free)} free of {_gib(disk.total)}"),
        *_gpus(),
    ]


def _gpus() -> list[tuple[str, float, str]]:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # late: only where it is installed

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  no package or no driver: its errors are not ours to know
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device)
        found.append(
            (f"GPU {index} memory", memory.used / memory.total, f"{_gib(memory.used)} of {_gib(memory.total)}")
        )
    return found


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
