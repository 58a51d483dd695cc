"""Profilers, one file for each subclass of `Profiler`; a class is loaded at its first use.

torch's own profiler is loaded when a `PyTorchProfiler` starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.profilers.base import PassThroughProfiler, Profiler
from instep.profilers.base import ProfilerName as ProfilerName
from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from instep.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from instep.profilers.run_clock import RunSummary as RunSummary
    from instep.profilers.simple import SimpleProfiler as SimpleProfiler

_names, __getattr__, __dir__ = loads(__name__)

__all__ = ["PassThroughProfiler", "Profiler", *_names]  # pyright: ignore[reportUnsupportedDunderAll]


def make_profiler(profiler: str | Profiler | None) -> Profiler:
    """Return the profiler for a Trainer's `profiler` argument; a name makes a new profiler.

    Args:
        profiler: None for a profiler that measures nothing; a `ProfilerName`, which the Trainer has checked; or a
            profiler.
    """
    if isinstance(profiler, Profiler):
        return profiler
    if profiler is None:
        return PassThroughProfiler()
    names = {"simple": "SimpleProfiler", "advanced": "AdvancedProfiler"}
    return __getattr__(names.get(profiler, "PyTorchProfiler"))()
