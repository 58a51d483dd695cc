"""Protocols and aliases that several floors share."""

from __future__ import annotations

import os
from typing import Any, Protocol, TypeAlias, runtime_checkable

PathLike: TypeAlias = "str | os.PathLike[str]"
StateDict: TypeAlias = "dict[str, Any]"


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and restored: tensors and JSON values only."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict) -> Any: ...
