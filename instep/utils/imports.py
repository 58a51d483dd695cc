"""Optional packages: imported on use, with an error that gives the exact `pip install`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from instep.errors import MissingPackageError


def require(module: str, *, extra: str | None, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: the dotted module name.
        extra: instep's extra that installs it, or None for a package that is always installed with instep.
        purpose: what needs it, for the error's text.

    Returns:
        The imported module.

    Raises:
        MissingPackageError: it is not installed.

    Example:
        >>> ray = require("ray", extra="ray", purpose="RayLauncher")  # doctest: +SKIP
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise
        install = f"pip install 'instep[{extra}]'" if extra else f"pip install {module.split('.')[0]}"
        raise MissingPackageError(f"{purpose} needs the package {module!r}. Install it with: {install}") from error
