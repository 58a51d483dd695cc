"""`ProgressFile` writes `progress.json` in a run folder: how far a run has come, readable also after it was killed."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.health.run_status import PROGRESS
from instep.utils.atomic import replace

EVERY_S = 2.0
_FIRST_S = 0.5  # seconds until the first write; a shorter run needs no file, since status.json says how it ended
_MOST_BYTES = 16384  # largest size of the metrics in bytes; readers accept at most 64 KiB for the file


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Convert metrics to JSON values: numbers, and "nan", "inf" or "-inf"; metrics beyond 16 KiB are left out.

    Example:
        >>> plain_metrics({"loss": 0.5, "norm": float("inf")})
        {'loss': 0.5, 'norm': 'inf'}
    """
    plain: dict[str, float | str] = {}
    size = 0
    for name, value in list(metrics.items()):
        size += len(json.dumps(name)) + 32
        if size > _MOST_BYTES:
            break
        plain[name] = float(value) if math.isfinite(value) else str(float(value))
    return plain


class ProgressFile:
    """Writes `progress.json` every two seconds in a thread, until `close`, without slowing down the training.

    Args:
        folder: the run folder.
        facts: function that returns the content, JSON values with `global_step`. It is called in the thread, so it must
            not wait for a device.
    """

    def __init__(self, folder: Path, facts: Callable[[], dict[str, Any]]) -> None:
        self._path, self._facts = folder / PROGRESS, facts
        self._last: tuple[float, int] | None = None
        self._closed, self._failed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="instep-progress-file", daemon=True)
        self._thread.start()

    def close(self, kind: Any = None, error: BaseException | None = None, trace: Any = None) -> None:
        """End the thread. If the file exists, write it a last time; after an error, leave it as it was written last."""
        self._failed = error is not None
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        if self._closed.wait(_FIRST_S):
            return
        closed = False
        while not closed:
            self._write()
            closed = self._closed.wait(EVERY_S)
        if not self._failed:
            self._write()

    def _write(self) -> None:
        # the disk is full or gone, or another thread changed a dict meanwhile: the next write tries again
        with suppress(OSError, RuntimeError):
            facts, now = self._facts(), time.monotonic()
            step, before = facts["global_step"], self._last
            self._last = now, step
            rate = None if before is None or now <= before[0] else (step - before[1]) / (now - before[0])
            content = {"time": time.time(), **facts, "steps_per_s": rate}
            replace(self._path, (json.dumps(content, indent=2) + "\n").encode())
