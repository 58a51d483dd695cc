"""`AdvancedProfiler`: measure every Python function that runs in a hook, a step or another action of a run."""

from __future__ import annotations

import cProfile
import io
import pstats
from typing import Any

from instep.errors import SettingError
from instep.profilers.base import Profiler
from instep.types import PathLike
from instep.utils.checks import is_number, wrong


class AdvancedProfiler(Profiler):
    """Measures all functions called in each action (hook, step, ...) by cProfile, which slows Python code down a lot.

    cProfile makes only one recording at a time: if an action runs inside another action, its functions count for the
    inner action only.

    Args:
        dirpath: as in `Profiler`.
        filename: as in `Profiler`.
        line_count_restriction: number (int) or fraction (float) of an action's functions that are reported.
        dump_stats: whether to write the recording of each action as a `.prof` file too, for `python -m pstats` or
            snakeviz.

    Raises:
        SettingError: an action is stopped without a start.

    Example:
        >>> profiler = AdvancedProfiler(line_count_restriction=5)
        >>> with profiler.profile("sorting"):
        ...     _ = sorted([2, 1])
        >>> "built-in method builtins.sorted" in profiler.summary()
        True

    Source: Lightning's `AdvancedProfiler`, with its names.
    """

    _kind = "advanced"

    def __init__(
        self,
        dirpath: PathLike | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        if not is_number(line_count_restriction) or line_count_restriction < 0:
            raise wrong("line_count_restriction", line_count_restriction, "a number (int) or a fraction (float)")
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._open: list[str] = []
        self._around: int | None = None  # number of actions that were open when the run began; None outside of a run

    def setup(self, stage: str, local_rank: int | None = None, log_dir: PathLike | None = None) -> None:
        """Begin a run."""
        self._around = len(self._open)
        super().setup(stage, local_rank, log_dir)

    def start(self, action_name: str) -> None:
        """Start recording into this action, and stop recording into the action around it."""
        if self._open:
            self.profiled_actions[self._open[-1]].disable()
        self._open.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        """Stop recording into this action, and continue recording into the action around it."""
        if action_name not in self._open:
            message = f"Attempting to stop recording an action ({action_name}) which was never started."
            raise SettingError(message, field="action_name", got=action_name)
        self.profiled_actions[self._open[-1]].disable()
        del self._open[len(self._open) - 1 - self._open[::-1].index(action_name)]
        if self._open:
            self.profiled_actions[self._open[-1]].enable()

    def summary(self) -> str:
        """Return a table of functions for each action, with the functions that took most time first."""
        for name in reversed(self._open):
            self.profiled_actions[name].disable()
        texts = [self._title()]
        for name, recording in self.profiled_actions.items():
            out = io.StringIO()
            pstats.Stats(recording, stream=out).strip_dirs().sort_stats("cumulative").print_stats(
                self.line_count_restriction
            )
            texts.append(f"Profile stats for: {name}\n{out.getvalue().strip()}\n")
            if self.dump_stats and self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                recording.dump_stats(self._folder / self._prepare_filename(name, ".prof"))
        return "\n".join(texts) if self.profiled_actions else ""

    def teardown(self, stage: str | None) -> None:
        """End a run, and drop its recordings; an action around the run goes on."""
        for name in reversed(self._open):
            self.profiled_actions[name].disable()
        if self._around is not None:
            del self._open[self._around :]
        self._around = None
        self.profiled_actions = {name: self.profiled_actions[name] for name in self._open}
        if self._open:
            self.profiled_actions[self._open[-1]].enable()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "profiled_actions": {}, "_open": []}  # cProfile cannot copy recordings
