"""`SimpleProfiler`: measure how long each hook, step and other action of a run takes."""

from __future__ import annotations

import math
import time
from array import array

from instep.errors import SettingError
from instep.profilers.base import Profiler
from instep.types import PathLike

_KEPT = 100_000


class SimpleProfiler(Profiler):
    """Measures how long each action takes by the host's clock, and reports the mean and the total of each action.

    The time of an action includes everything that runs inside it. On a GPU, the time ends when the work is queued, not
    when the work is done; use `PyTorchProfiler` for the times of the device.

    Args:
        dirpath: as in `Profiler`.
        filename: as in `Profiler`.
        extended: whether to report the number of calls and the share of the run's time too.

    Attributes:
        recorded_durations: seconds of the calls of each action; at least the last 100,000 calls are kept.

    Raises:
        SettingError: an action is started inside itself, or stopped without a start.

    Example:
        >>> profiler = SimpleProfiler()
        >>> with profiler.profile("reading"):
        ...     pass
        >>> len(profiler.recorded_durations["reading"])
        1

    Source: Lightning's `SimpleProfiler`, with its names.
    """

    _kind = "simple"

    def __init__(self, dirpath: PathLike | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, array[float]] = {}
        # For each action: number and total seconds of the calls that were dropped from the list.
        self._earlier: dict[str, tuple[int, float]] = {}
        self.start_time = time.perf_counter()
        self._around: set[str] | None = None  # actions that were open when the run began; None outside of a run

    def start(self, action_name: str) -> None:
        """Record the time at which an action starts."""
        if action_name in self.current_actions:
            message = f"Attempted to start {action_name} which has already started: give the inner one another name."
            raise SettingError(message, field="action_name", got=action_name)
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Add the seconds since the action started."""
        end = time.perf_counter()
        start = self.current_actions.pop(action_name, None)
        if start is None:
            message = f"Attempting to stop recording an action ({action_name}) which was never started."
            raise SettingError(message, field="action_name", got=action_name)
        durations = self.recorded_durations.setdefault(action_name, array("d"))
        durations.append(end - start)
        if len(durations) == 2 * _KEPT:
            calls, seconds = self._earlier.get(action_name, (0, 0.0))
            self._earlier[action_name] = calls + _KEPT, seconds + math.fsum(durations[:_KEPT])
            del durations[:_KEPT]

    def setup(self, stage: str, local_rank: int | None = None, log_dir: PathLike | None = None) -> None:
        """Begin a run, and drop the measurements of the run before."""
        if self._stage is not None:
            self.recorded_durations, self._earlier, self.start_time = {}, {}, time.perf_counter()
        self._around = {*self.current_actions}
        super().setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        """End a run; after an error, actions that began in the run may still be open, and are dropped."""
        if self._around is not None:
            for name in self.current_actions.keys() - self._around:
                del self.current_actions[name]
        self._around = None

    def summary(self) -> str:
        """Return a table of all actions, with the longest first."""
        total = time.perf_counter() - self.start_time
        times: list[tuple[float, int, str]] = []
        for name, durations in self.recorded_durations.items():
            calls, seconds = self._earlier.get(name, (0, 0.0))
            times.append((seconds + math.fsum(durations), calls + len(durations), name))
        times.sort(reverse=True)
        rows = [("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")]
        rows.append(("Total", "-", f"{sum(calls for _, calls, _ in times)}", f"{total:.5}", "100 %"))
        for seconds, calls, name in times:
            rows.append((name, f"{seconds / calls:.5}", f"{calls}", f"{seconds:.5}", f"{100 * seconds / total:.5}"))
        if not self.extended:
            rows = [(name, mean, seconds) for name, mean, _, seconds, _ in rows if name != "Total"]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([self._title(), *lines, ""])
