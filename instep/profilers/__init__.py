"""Profilers: one file each over `Profiler`. A name is loaded when first used; torch's profiler when it starts."""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

_HOME = {
    "RunSummary": "run_clock",
}

if TYPE_CHECKING:
    from instep.profilers.run_clock import RunSummary as RunSummary

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
