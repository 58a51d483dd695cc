"""`Named`: the form in which a checkpoint stores a class or function, and how to find the object by its name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class Named:
    """A class or function in a checkpoint, stored by its name; or a `functools.partial` with its arguments.

    Args:
        path: dotted name; written as `<name>` if no object can be found by this name, as for a lambda.
        args: positional arguments of a partial; None for a class or function.
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
    """Return True if a value is a class, a function, or another callable with a qualified name."""
    return isinstance(value, type) or (callable(value) and isinstance(getattr(value, "__qualname__", None), str))


def loaded(path: Any) -> Any:
    """Find an object by its dotted path in modules that are already imported; None if there is none."""
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
    """Return the name by which another program would import the main file of this program."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else Path(file).stem if file else "__main__"


def name_of(code: Any) -> str:
    """Return the dotted path of a class or function; `<path>` if `loaded` does not find the object at this path."""
    home = getattr(code, "__module__", None) or "builtins"
    home = _main_name() if home in ("__main__", "__mp_main__") else home
    short = getattr(code, "__name__", code.__qualname__)
    own = f"{home}.{code.__qualname__}"
    # `__module__` is missing or wrong for some functions of torch.
    places = (f"torch.nn.functional.{short}", f"torch.{short}", own)
    return next((path for path in places if loaded(path) is code), f"<{own}>")
