"""torch's profiler for a handwritten loop, with a trace file per rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from instep.accelerator.handlers import ProfileKwargs
from instep.utils.paths import local_path

if TYPE_CHECKING:
    from torch.profiler import profile as Profiler


@contextmanager
def profile(handler: ProfileKwargs | None = None, process_index: int = 0) -> Iterator[Profiler]:
    """Record what runs inside.

    With `output_trace_dir` every rank writes `profile_<rank>.json` there, for chrome://tracing or Perfetto; what later
    cycles of a schedule record goes to `profile_<rank>_<cycle>.json`, from 2. Traces are written after an error too;
    what `on_trace_ready` raises is raised at the end of the block.

    Args:
        handler: what to record; None takes `ProfileKwargs()`.
        process_index: the rank, for the file's name.

    Returns:
        torch's profiler: with a schedule call its `step()` after every batch.

    Example:
        >>> with profile(ProfileKwargs(activities=["cpu"])) as profiler:
        ...     _ = torch.ones(2) + 1
        >>> "aten::add" in {event.key for event in profiler.key_averages()}
        True
    """
    options = (handler or ProfileKwargs()).options()
    folder, schedule = options.pop("output_trace_dir", None), options.pop("schedule_option", None)
    activities, ready = options.pop("activities", None), options.pop("on_trace_ready", None)
    ready = _Ready(None if folder is None else local_path(folder), process_index, ready)
    with torch.profiler.profile(
        activities=None if activities is None else [_activity(name) for name in activities],
        schedule=None if schedule is None else torch.profiler.schedule(**schedule),
        on_trace_ready=ready,
        **options,
    ) as profiler:
        yield profiler
    if ready.error is not None:
        raise ready.error
    if folder is not None and ready.calls == 0:
        warnings.warn(
            f"nothing was recorded, so there is no trace in {folder}: the schedule {dict(schedule or {})} counts calls "
            "of the profiler's step(), and its first active one was not reached",
            stacklevel=3,
        )


class _Ready:
    """Called whenever a recording is complete: writes the trace, then calls the user's function.

    An error waits for the end of the block: one that leaves a callback makes torch's profiler end the process.
    """

    def __init__(self, folder: Path | None, rank: int, then: Callable[[Any], Any] | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is found out before training
        self.folder, self.rank, self.then = folder, rank, then
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self, profiler: Profiler) -> None:
        self.calls += 1
        try:
            if self.folder is not None:
                cycle = "" if self.calls == 1 else f"_{self.calls}"
                profiler.export_chrome_trace(str(self.folder / f"profile_{self.rank}{cycle}.json"))
            if self.then is not None:
                self.then(profiler)
        except Exception as error:  # noqa: BLE001  raised at the end of the block
            self.error = self.error or error


def _activity(name: str) -> Any:
    return getattr(torch.profiler.ProfilerActivity, name.upper())
