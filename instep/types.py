"""Protocols and aliases that several floors share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from upath import UPath

PathLike: TypeAlias = str | os.PathLike[str]
Location: TypeAlias = (
    "PathLike | UPath"  # where checkpoints may lie: a path, a URL as text, or a universal_pathlib path
)
StateDict: TypeAlias = "dict[str, Any]"


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and restored: tensors and JSON values only."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> Any: ...
