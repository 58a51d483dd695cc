"""Models larger than the memory: empty weights, device maps, offload, quantisation. A name is loaded on first use."""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

_HOME: dict[str, str] = {}

if TYPE_CHECKING:
    pass

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
