"""Imports on first use: optional packages, with an error that gives the `pip install`, and a package's public names."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from instep.errors import MissingPackageError

_DISTRIBUTIONS = {"upath": "universal-pathlib"}  # modules whose name is not that of the pip package
# matches one import line in ruff's format
_ON_USE = re.compile(r"^    from (\S+) import \(?\s*(\w+) as \2\b", re.MULTILINE)


def require(module: str, *, extra: str | None, purpose: str) -> ModuleType:
    """Import an optional package at its first use.

    Args:
        module: the dotted module name.
        extra: instep's extra that installs it, or None for a package that is always installed with instep.
        purpose: what needs it, for the error's text.

    Returns:
        The imported module.

    Raises:
        MissingPackageError: it is not installed, or in a version that instep's metadata does not allow.

    Example:
        >>> ray = require("ray", extra="ray", purpose="RayLauncher")  # doctest: +SKIP
    """
    package = module.partition(".")[0]
    check_version(package, extra=extra, purpose=purpose)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or package != error.name.split(".")[0]:
            raise
        raise _missing(package, extra, purpose) from error
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs {package}, whose version {_versions(package)[0]} cannot be loaded: {error}. It may want "
            "a newer version of what it names, such as torch."
        ) from error


def check_torch(major: int, minor: int, *, purpose: str) -> None:
    """Raise if torch is too old for a part of instep; a nightly build counts as the release that follows it.

    Raises:
        MissingPackageError: the text has the purpose, both versions and the `pip install`.
    """
    import torch  # imported late: this file is read before torch is

    if tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor):
        wanted = f"torch>={major}.{minor}"
        raise MissingPackageError(
            f"{purpose} needs {wanted}, and {torch.__version__} is installed. Run: pip install '{wanted}'"
        )


@contextmanager
def without_collections() -> Iterator[None]:
    """Run an import without garbage collection.

    Each full collection walks through all of torch's 200,000 objects, which are never freed; together the collections
    take a quarter of the time in which torch's compiler loads.

    Each full one walks through all of torch's 200,000 objects, which are there to stay: together a quarter of the time
    that torch's compiler takes to load.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def check_installed(package: str, *, extra: str | None, purpose: str) -> None:
    """Raise as `require` does if a package is missing or has a wrong version, but do not import it."""
    if find_spec(package) is None:
        raise _missing(package, extra, purpose)
    check_version(package, extra=extra, purpose=purpose)


def check_version(package: str, *, extra: str | None, purpose: str) -> None:
    """Raise if a package's installed version is outside the range in instep's metadata.

    A package without metadata (a folder on the path, a stand-in) has no version to check.

    Raises:
        MissingPackageError: the version is out of the range; the text has both, and the `pip install`.
    """
    found, wanted = _versions(package)
    if wanted is not None:
        install = _install(extra, f"'{_distribution(package)}{wanted}'")
        raise MissingPackageError(f"{purpose} needs {package}{wanted}, and {found} is installed. Run: {install}")


@cache
def _versions(package: str) -> tuple[str, str | None]:
    """Return a package's installed version, and the range that it violates; None if it fits."""
    from packaging.requirements import Requirement  # imported late: 30 ms, which importing the Trainer does not pay
    from packaging.utils import canonicalize_name

    name = canonicalize_name(_distribution(package))
    try:
        found = metadata.version(name)
        # Parse the part before the marker only: packaging reads markers by `ast`, which may fail in two threads at once
        # (cpython#106905).
        wanted = [Requirement(line.partition(";")[0]) for line in metadata.requires("instep") or ()]
    except metadata.PackageNotFoundError:
        return "", None
    ranges = (each.specifier for each in wanted if canonicalize_name(each.name) == name)
    return found, next((str(each) for each in ranges if not each.contains(found, prereleases=True)), None)


def _distribution(package: str) -> str:
    """Return the pip name of the package that holds a module."""
    return _DISTRIBUTIONS.get(package, package)


def _missing(package: str, extra: str | None, purpose: str) -> MissingPackageError:
    install = _install(extra, _distribution(package))
    return MissingPackageError(f"{purpose} needs the package {package!r}. Install it with: {install}")


def _install(extra: str | None, requirement: str) -> str:
    return f"pip install 'instep[{extra}]'" if extra else f"pip install {requirement}"


def loads(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` of a package whose names load on first use.

    The package's `__init__.py` gives each name and its file once, as `from file import name as name` below `if
    TYPE_CHECKING:`. Type checkers and this function read these lines, so instep needs its source files to run, as torch
    does.

    Args:
        package: the package's `__name__`.

    Returns:
        The names that load on use, for `__all__`; the package's `__getattr__`, which imports a name once; and its
        `__dir__`.

    Example:
        In a package's `__init__.py`::

            if TYPE_CHECKING:
                from instep.callbacks.timer import Timer as Timer

            __all__, __getattr__, __dir__ = loads(__name__)
    """
    spec: Any = sys.modules[package].__spec__
    home = {name: file for file, name in _ON_USE.findall(spec.loader.get_source(package))}

    def load(name: str) -> Any:
        if name not in home:
            # `from package import file` first asks for the name as an attribute
            if find_spec(f"{package}.{name}") is not None:
                raise AttributeError(name)
            from instep.utils.porting import no_such_name  # imported late: only an error reads these tables

            raise no_such_name(package, name)
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home), load, lambda: sorted(sys.modules[package].__all__)
