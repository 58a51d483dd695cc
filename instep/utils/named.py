"""Classes and functions by name: how a file stores one, and which object of this program a name means."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class Named:
    """Name of a class or function in a checkpoint; with arguments, it stands for a `functools.partial`.

    Args:
        path: the dotted name; within `<>` where nothing is found under it, such as a lambda.
        args: positional arguments of a partial; None: it is no partial.
        keywords: keyword arguments of a partial.
    """

    def __init__(
        self, path: str, args: tuple[Any, ...] | None = None, keywords: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.args, self.keywords = path, args, keywords

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        name = self.path[1:-1] if self.path.startswith("<") else self.path
        if self.args is None:
            return name
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in (self.keywords or {}).items())]
        return f"partial({', '.join([name, *given])})"


def is_code(value: Any) -> bool:
    """Return True if a value is a class, a function or another callable that its module has by name."""
    return isinstance(value, type) or (callable(value) and isinstance(getattr(value, "__qualname__", None), str))


def loaded(path: Any) -> Any:
    """Return the object with this dotted path in modules that are already loaded; None if there is none."""
    parts = path.split(".") if isinstance(path, str) and len(path) < 1000 else []
    for split in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:split])
        for module in (name, "__main__") if name == _main_name() else (name,):
            found: Any = sys.modules.get(module)
            for part in parts[split:]:
                found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
            if found is not None:
                return found
    return None


def _main_name() -> str:
    """Return the module name under which another program would import this program's main file."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else Path(file).stem if file else "__main__"


def name_of(code: Any) -> str:
    """Return the path by which `loaded` finds a class or function; if `loaded` cannot find it, its name in `<>`."""
    home = getattr(code, "__module__", None) or "builtins"
    home = _main_name() if home in ("__main__", "__mp_main__") else home
    short = getattr(code, "__name__", code.__qualname__)
    own = f"{home}.{code.__qualname__}"
    # Some functions of torch have no or a wrong `__module__`.
    places = (f"torch.nn.functional.{short}", f"torch.{short}", own)
    return next((path for path in places if loaded(path) is code), f"<{own}>")
