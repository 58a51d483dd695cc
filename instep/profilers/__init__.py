"""Profilers: one file each over `Profiler`. A name is loaded when first used; torch's profiler when it starts."""

from typing import TYPE_CHECKING

from instep.profilers.base import PassThroughProfiler, Profiler
from instep.utils.imports import loads

_HOME = {
    "AdvancedProfiler": "advanced",
    "PyTorchProfiler": "pytorch",
    "RunSummary": "run_clock",
    "SimpleProfiler": "simple",
}

if TYPE_CHECKING:
    from instep.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from instep.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from instep.profilers.run_clock import RunSummary as RunSummary
    from instep.profilers.simple import SimpleProfiler as SimpleProfiler

__all__ = ["PassThroughProfiler", "Profiler", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
