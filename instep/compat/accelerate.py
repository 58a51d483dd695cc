"""Accelerate's names for instep's classes, in place of the package `accelerate` in one program.

`instep launch --as accelerate script.py` puts them there, or `install()` before the first import of accelerate. Nothing
is written to the disk, and an installed accelerate is not loaded. A name that instep has no counterpart for can be
imported; using it is an error that says what to do.

Example:
    >>> from instep.compat.accelerate import Accelerator
    >>> from instep.compat.accelerate.utils import DistributedType, set_seed
    >>> Accelerator.__mro__[2]
    <class 'instep.accelerator.accelerator.Accelerator'>
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from instep.compat import tables
from instep.compat.adapting import adapt
from instep.errors import UsageError
from instep.utils import porting

__path__: list[str] = []  # a package, whose modules `_Finder` makes

VERSION = "1.15.0"
"""The version of Accelerate whose names these are."""

MODULES = frozenset(
    (
        "accelerator", "big_modeling", "checkpointing", "commands", "commands.config", "data_loader", "hooks",
        "inference", "launchers", "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config",
        "scheduler", "state", "test_utils", "test_utils.testing", "tracking", "utils", "utils.ao", "utils.bnb",
        "utils.constants", "utils.dataclasses", "utils.deepspeed", "utils.environment", "utils.fsdp_utils",
        "utils.imports", "utils.launch", "utils.megatron_lm", "utils.memory", "utils.modeling", "utils.offload",
        "utils.operations", "utils.other", "utils.random", "utils.torch_xla",
        "utils.transformer_engine", "utils.versions",
    )
)  # fmt: skip
"""Modules of Accelerate."""

_found: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    return _find(__name__, name)


class _Names(ModuleType):
    """A module of Accelerate: `utils`, `state` and so on, or the package."""

    def __getattr__(self, name: str) -> Any:
        return _find(self.__name__, name)


class _Finder(MetaPathFinder, Loader):
    """Maker of the modules of one package of names.

    Args:
        root: the name of the package; modules below it are `MODULES`.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._root and not fullname.startswith(f"{self._root}."):
            return None
        inner = fullname[len(self._root) + 1 :]
        if inner and inner not in MODULES:
            raise ModuleNotFoundError(
                f"{fullname} is not there: instep takes the place of accelerate in this program, and "
                f"{porting.advice(f'accelerate.{inner}')}",
                name=fullname,
            )
        return ModuleSpec(fullname, self, origin="instep", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = __file__
        if module.__name__ == self._root:
            vars(module)["__version__"] = VERSION

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        """Yield the distribution that packages ask for accelerate's version."""
        if self._root == "accelerate" and context.name == "accelerate":
            yield _Metadata()


class _Metadata(Distribution):
    """The metadata of the package that is stood in for."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: accelerate\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


sys.meta_path.append(_Finder(__name__))  # the modules below this one are no files; it answers for them alone


def install() -> None:
    """Make `import accelerate` find these names in this process; a second call does nothing.

    Raises:
        UsageError: accelerate is imported already.

    Example:
        >>> from instep.compat import accelerate
        >>> accelerate.install()  # doctest: +SKIP
    """
    if any(isinstance(finder, _Finder) and finder._root == "accelerate" for finder in sys.meta_path):
        return
    if "accelerate" in sys.modules:
        raise UsageError(
            "accelerate is imported already, so instep cannot take its place. Call install() before the first import "
            "of accelerate, or of a package that imports it (transformers, peft); or `instep launch --as accelerate`."
        )
    sys.meta_path.insert(0, _Finder("accelerate"))


def _find(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    inner = module.removeprefix("instep.compat.").partition(".")[2]
    if f"{inner}.{name}".lstrip(".") in MODULES:
        return import_module(f"{module}.{name}")
    if name not in _found:
        found = _make(name, f"accelerate.{inner + '.' if inner else ''}{name}")
        is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"  # importlib's, for `from ... import`
        if type(found) is _Missing and not is_import:
            raise AttributeError(_text(found))
        _found[name] = found
    return _found[name]


def _make(name: str, whole: str) -> Any:
    parts = import_module("instep.compat.accelerate_parts")
    if name in parts.__all__:
        return vars(parts)[name]
    target = porting.successor(f"accelerate.{name}")
    if target is not None:
        home, _, leaf = target.rpartition(".")
        return adapt(getattr(import_module(home), leaf), __name__, name, leaf, _silently)
    if name in tables.DEFINED:
        imports, value = tables.DEFINED[name]
        made: dict[str, Any] = {}
        exec(f"{imports}\nvalue = {value}", made)  # our own text, which `migrate` writes into scripts
        ask = made["value"]
        return (lambda *args, **kwargs: ask()) if name.endswith("_available") and callable(ask) else ask
    if name.startswith("is_") and name.endswith(("_available", "_version")):
        return lambda *args, **kwargs: False  # of a package or device that instep has no part for
    return _Missing(name, (), {"__doc__": f"{whole}: {porting.advice(whole)}"})


def _silently(key: str, text: str) -> None:
    """Leave out what `instep migrate` would say: this program is run as it is."""


class _Missing(type):
    """Type of what Accelerate has and instep has not: a class that nothing is an instance of."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(_text(cls))


def _text(missing: type) -> str:
    return f"{missing.__doc__}. instep takes the place of accelerate in this program."
