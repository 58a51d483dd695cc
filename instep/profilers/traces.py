"""Make torch's profiler and write its recordings, for `PyTorchProfiler` and `accelerator.profile()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from instep.errors import one_of

if TYPE_CHECKING:
    from torch.profiler import profile as Recorder

Write = Callable[["Recorder", int], None]


class TraceReady:
    """Callback of torch's profiler that writes each finished recording, then calls the user's function.

    An error is kept, and raised at the end of the profiled block, since an error inside the callback would make torch's
    profiler end the process.

    Args:
        write: function that gets torch's profiler and the number of the recording, from 1; None: nothing is written.
        then: function of the user, which gets torch's profiler; None: nothing more is called.

    Attributes:
        calls: number of recordings so far.
        error: the first error; None if there was none.
    """

    def __init__(self, write: Write | None, then: Callable[[Any], Any] | None = None) -> None:
        self._write, self._then = write, then
        self.calls = 0
        self.error: Exception | None = None

    def __call__(self, profiler: Recorder) -> None:
        self.calls += 1
        try:
            if self._write is not None:
                self._write(profiler, self.calls)
            if self._then is not None:
                self._then(profiler)
        except Exception as error:  # noqa: BLE001  raised by `check`
            self.error = self.error or error

    def check(self) -> None:
        """Raise the first error that occurred in the callback, if any."""
        if self.error is not None:
            raise self.error


def chrome_traces(folder: Path, rank: int) -> Write:
    """Return a function that writes `profile_<rank>.json`, and `profile_<rank>_<number>.json` for later recordings."""
    # The folder is made before training, so that an error about it comes early.
    folder.mkdir(parents=True, exist_ok=True)

    def write(profiler: Recorder, number: int) -> None:
        suffix = "" if number == 1 else f"_{number}"
        profiler.export_chrome_trace(str(folder / f"profile_{rank}{suffix}.json"))

    return write


def recorder(
    ready: TraceReady,
    activities: Iterable[Any] | None = None,
    schedule: Callable[[int], Any] | Mapping[str, int] | None = None,
    **options: Any,
) -> Recorder:
    """Make torch's profiler from instep's arguments.

    Args:
        ready: callback that is called with each recording.
        activities: names such as "cpu", or torch's own values; None: all activities of this machine.
        schedule: a schedule of torch, or a dict of its arguments; None: everything is recorded.
        options: further arguments of `torch.profiler.profile`.
    """
    chosen = None if activities is None else [activity(name) for name in activities]
    if isinstance(schedule, Mapping):
        schedule = torch.profiler.schedule(**schedule)
    return torch.profiler.profile(activities=chosen, schedule=schedule, on_trace_ready=ready, **options)


def activity(name: Any) -> Any:
    """Return torch's kind of activity for a name; any other value is returned unchanged.

    Raises:
        SettingError: torch has no activity of this name.
    """
    if not isinstance(name, str):
        return name
    known = torch.profiler.ProfilerActivity.__members__
    if name.upper() not in known:
        raise one_of("activities", name, map(str.lower, known))
    return known[name.upper()]
