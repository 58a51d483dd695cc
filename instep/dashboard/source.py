"""Data that all open pages share: the runs, their curves, and the machine's load, all read in threads."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from instep.errors import UsageError
from instep.runs import Metrics, MetricsReader, Run, find_runs
from instep.utils.imports import require

Result = TypeVar("Result")
FRESH_S = 1.5
"""Maximum age of the list of runs, in seconds; pages that are open at the same time thus read the folders once."""
POINTS = 600
"""Maximum number of points in a curve: as many as a plot has pixels in its width."""
_CURVES = 2000  # maximum number of curves that stay in memory; they take at most 0.2 GB


@dataclass
class _Kept:
    """Reader of a run's curves, with the result of its last reading."""

    reader: MetricsReader
    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: Any = None
    metrics: Metrics = field(default_factory=Metrics)


class Source:
    """The runs below a folder, which are read again when their files change.

    Args:
        folder: a run folder, or a folder that has runs in it.

    Raises:
        UsageError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._runs = find_runs(folder)
        self._searched = time.monotonic()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, _Kept] = OrderedDict()
        self._verified: dict[tuple[Any, ...], dict[str, str]] = {}

    def runs(self) -> list[Run]:
        """Return the runs, the newest first."""
        with self._lock:
            if time.monotonic() - self._searched >= FRESH_S:
                with suppress(UsageError):  # if the folder was deleted, show its runs as they were
                    self._runs = find_runs(self.folder, self._runs)
                self._searched = time.monotonic()
            return self._runs

    def metrics(self, run: Run) -> Metrics:
        """Read a run's curves, reduced to as many points as a plot shows; for a growing run, read only new values."""
        with self._lock:
            kept = self._kept.setdefault(run.folder, _Kept(MetricsReader(run.folder, None, POINTS)))
            self._kept.move_to_end(run.folder)
            while len(self._kept) > 1 and sum(len(each.metrics.curves) for each in self._kept.values()) > _CURVES:
                self._kept.popitem(last=False)
        with kept.lock:
            if kept.stamp != run.stamp:
                kept.metrics, kept.stamp = kept.reader.read(), run.stamp
            return kept.metrics

    def checkpoints(self, run: Run) -> list[dict[str, Any]]:
        """List the checkpoints of a run, with the results of `verify`."""
        found = run.checkpoints()
        return [one | self._verified.get(_mark(run, one), {}) if one["state"] == "complete" else one for one in found]

    def verify(self, run: Run) -> None:
        """Compare every byte of a run's checkpoints with its checksum, and keep the results for `checkpoints`."""
        for one in run.checkpoints(verify=True):
            said = one["note"] or time.strftime("at %H:%M:%S")
            self._verified[_mark(run, one)] = {"state": one["state"], "note": said}


def _mark(run: Run, one: dict[str, Any]) -> tuple[Any, ...]:
    return run.folder, one["name"], one.get("created"), one["bytes"]


async def in_thread(work: Callable[..., Result], *args: Any) -> Result:
    """Run a slow function in a thread and return its result; Ctrl-C does not wait for the thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except Exception as error:  # noqa: BLE001  it is raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, name="instep-dashboard", daemon=True).start()
    return await asyncio.wrap_future(future)


def look_at_machine(folder: Path) -> list[tuple[str, float, str]]:
    """Measure the load of this machine now, and of the disk that holds a folder.

    Returns:
        For processor, memory, disk and each GPU, in this order: a name, the used part from 0 to 1, and a text with the
        amounts, such as `3.0 GiB of 8.0 GiB`; for the disk, the text has the free amount.
    """
    psutil: Any = require("psutil", extra="dashboard", purpose="instep dashboard")
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(folder if folder.exists() else "/")
    load = psutil.cpu_percent() / 100
    return [
        ("Processor", load, f"{load:.0%} of {psutil.cpu_count()} cores"),
        ("Memory", memory.percent / 100, f"{_gib(memory.total - memory.available)} of {_gib(memory.total)}"),
        ("Disk", disk.used / disk.total, f"{_gib(disk.free)} free of {_gib(disk.total)}"),
        *_gpus(),
    ]


def _gpus() -> list[tuple[str, float, str]]:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # imported late, since it may not be installed

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  without the package or the driver, errors of several types are raised
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory: Any = pynvml.nvmlDeviceGetMemoryInfo(device)
        text = f"{_gib(memory.used)} of {_gib(memory.total)}"
        found.append((f"GPU {index} memory", memory.used / memory.total, text))
    return found


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
