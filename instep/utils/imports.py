"""Import optional packages and the public names of instep's packages only when they are used."""

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

_DISTRIBUTIONS = {"upath": "universal-pathlib"}  # names of pip packages that differ from the module's name
# Matches one name in an indented import line, as ruff formats it.
_ON_USE = re.compile(r"^    from (\S+) import \(?\s*(\w+) as \2\b", re.MULTILINE)


def require(module: str, *, extra: str | None, purpose: str) -> ModuleType:
    """Import a module of an optional package, or raise an error that says how to install the package.

    Args:
        module: dotted name of the module.
        extra: extra of instep that installs the package; None for a package that is always installed with instep.
        purpose: what needs the package, for the error message.

    Returns:
        The imported module.

    Raises:
        MissingPackageError: the package is not installed, or its version is not one that instep's metadata allows.

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
    """Raise an error if torch is older than a feature of instep needs; a nightly build counts as its next release.

    Raises:
        MissingPackageError: torch is too old; the message has the purpose, both versions and the `pip install` command.
    """
    import torch  # imported late: this file must be usable without torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor):
        wanted = f"torch>={major}.{minor}"
        raise MissingPackageError(
            f"{purpose} needs {wanted}, and {torch.__version__} is installed. Run: pip install '{wanted}'"
        )


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn off garbage collection in the `with` block, to speed up an import in it.

    Each full collection visits all of torch's 200,000 objects, which are never freed. When torch's compiler is
    imported, the collections take a quarter of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def check_installed(package: str, *, extra: str | None, purpose: str) -> None:
    """Raise the error of `require` if a package is missing or has a wrong version, without importing it."""
    if find_spec(package) is None:
        raise _missing(package, extra, purpose)
    check_version(package, extra=extra, purpose=purpose)


def check_version(package: str, *, extra: str | None, purpose: str) -> None:
    """Raise an error if the installed version of a package is outside of the range in instep's metadata.

    A package without metadata, such as a folder on the path, is not checked.

    Raises:
        MissingPackageError: the version is out of range; the message has the version, the range and the `pip install`
            command.
    """
    found, wanted = _versions(package)
    if wanted is not None:
        install = _install(extra, f"'{_distribution(package)}{wanted}'")
        raise MissingPackageError(f"{purpose} needs {package}{wanted}, and {found} is installed. Run: {install}")


@cache
def _versions(package: str) -> tuple[str, str | None]:
    """Return the installed version of a package, and the range that it violates (None if it is in the range)."""
    from packaging.requirements import Requirement  # imported late: takes 30 ms
    from packaging.utils import canonicalize_name

    name = canonicalize_name(_distribution(package))
    try:
        found = metadata.version(name)
        # Parse only the part before the marker: packaging parses markers by `ast`, which may fail if two threads do it
        # at the same time (cpython#106905).
        wanted = [Requirement(line.partition(";")[0]) for line in metadata.requires("instep") or ()]
    except metadata.PackageNotFoundError:
        return "", None
    ranges = (each.specifier for each in wanted if canonicalize_name(each.name) == name)
    return found, next((str(each) for each in ranges if not each.contains(found, prereleases=True)), None)


def _distribution(package: str) -> str:
    """Return the name of the pip package that contains a module."""
    return _DISTRIBUTIONS.get(package, package)


def _missing(package: str, extra: str | None, purpose: str) -> MissingPackageError:
    install = _install(extra, _distribution(package))
    return MissingPackageError(f"{purpose} needs the package {package!r}. Install it with: {install}")


def _install(extra: str | None, requirement: str) -> str:
    return f"pip install 'instep[{extra}]'" if extra else f"pip install {requirement}"


def loads(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` of a package whose names are imported when they are first used.

    The package's `__init__.py` has a line `from file import name as name` for each name, below `if TYPE_CHECKING:`.
    Type checkers and this function read these lines, so instep needs its source files at run time, as torch does.

    Args:
        package: the package's `__name__`.

    Returns:
        The public names, for `__all__`; the package's `__getattr__`, which imports a name at its first use; and its
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
            # `from package import submodule` first calls __getattr__ with the name of the submodule. Python imports the
            # submodule after this error.
            if find_spec(f"{package}.{name}") is not None:
                raise AttributeError(name)
            from instep.utils.porting import no_such_name  # imported late: only an error needs it

            raise no_such_name(package, name)
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(home), load, lambda: sorted(sys.modules[package].__all__)
