"""Make modules with another package's names, and put them in the place of the package in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from instep.compat import tables
from instep.compat.adapting import adapt_found
from instep.errors import UsageError
from instep.utils import porting


@dataclass(eq=False)
class NameFinder(MetaPathFinder, Loader):
    """Import finder that makes modules with the names of a replaced package.

    Args:
        roots: import name of each top module -> its name in the other package.
        find: function that gets a module's full name and a name in the module, and returns the object with that name or
            raises AttributeError.
        has: function that gets a full name, and returns whether the other package has a module of that name.
        missing: function that makes the error for a module that the other package does not have.
    """

    roots: dict[str, str]
    find: Callable[[str, str], Any]
    has: Callable[[str], bool]
    missing: Callable[[str], ImportError]

    def their_name(self, fullname: str) -> str | None:
        """Return a module's name in the other package; None if the module's name begins with none of `roots`."""
        for root, theirs in self.roots.items():
            if fullname == root or fullname.startswith(f"{root}."):
                return theirs + fullname[len(root) :]
        return None

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        theirs = self.their_name(fullname)
        if theirs is None:
            return None
        if fullname not in self.roots and not self.has(theirs):
            raise self.missing(fullname)
        return ModuleSpec(fullname, self, origin="instep", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__file__=__file__, __getattr__=lambda name: self.find(module.__name__, name))


class Door(NameFinder):
    """Import finder that can replace a package in this process.

    Args:
        home: module of instep that has the names.
        package: name of the distribution that is replaced.
        version: version of the package that this process gets to see.
        roots: import names that are replaced -> their names in the package.
        has: function that gets a full name, and returns whether the package has a module of that name.
        parts: modules with further names, searched in this order. If the tables of `instep.utils.porting` have a name
            too, the object in `parts` is used; in modules below `lightning.pytorch`, the object of the tables is used.
    """

    def __init__(
        self, home: str, package: str, version: str, roots: Mapping[str, str], has: Callable[[str], bool], *parts: str
    ) -> None:
        super().__init__({home: next(iter(roots.values()))}, self.find_name, has, self._no_module)
        self.home, self.package, self.version, self._taken, self._parts = home, package, version, dict(roots), parts
        self._found: dict[str, Any] = {}
        sys.meta_path.append(self)  # modules below `home` have no files, so only this finder can find them

    @property
    def installed(self) -> bool:
        """Whether the package has been replaced in this process."""
        return self.package in self.roots

    def install(self) -> None:
        """Replace the package in this process: `import` then finds instep's modules. A second call does nothing.

        Raises:
            UsageError: the package has been imported already.

        Example:
            >>> from instep.compat import accelerate
            >>> accelerate.install()  # doctest: +SKIP
        """
        if self.installed:
            return
        if any(root in sys.modules for root in self._taken):
            raise UsageError(
                f"{self.package} is imported already, so instep cannot take its place. Call install() before the first "
                f"import of {self.package}, or of a package that imports it; or `instep launch --as`."
            )
        self.roots.update(self._taken)
        sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        """Yield the distribution in which other packages look up the version of the replaced package."""
        if self.installed and context.name == self.package:
            yield _Metadata(self.package, self.version)

    def find_name(self, module: str, name: str) -> Any:
        """Return the object that a module has under a name; make it at the first request."""
        if name == "__version__":
            return self.version
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        whole = f"{self.their_name(module)}.{name}"
        if self.has(whole):
            return import_module(f"{module}.{name}")
        if whole not in self._found:
            made = self._make(whole)
            if made is None:
                made = _Missing(name, (), {"advice": f"{whole}: {self._advice(whole)}."})
                # `from ... import` gets the stand-in; importlib runs it in `_handle_fromlist`. Any other access to the
                # name is an error.
                is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
                if not is_import:
                    raise AttributeError(made.advice)
            self._found[whole] = made
        return self._found[whole]

    def _make(self, whole: str) -> Any:
        """Return the object that replaces a name of the package, given in full; None if there is no such object."""
        parent, _, name = whole.rpartition(".")
        ours = next((found[name] for found in map(vars, map(import_module, self._parts)) if name in found), None)
        target = porting.successor(porting.canonical(whole) or "") or porting.successor(f"{self.package}.{name}")
        if ours is not None and (target is None or not parent.startswith("lightning.pytorch")):
            return ours
        return defined(name) if target is None else adapt_found(target, self.home, name, silently)

    def _advice(self, whole: str) -> str:
        canonical = porting.canonical(whole) or whole
        return f"{porting.advice(canonical)}. instep takes the place of {self.package} in this program"

    def _no_module(self, fullname: str) -> ImportError:
        return ModuleNotFoundError(
            f"{fullname} is not there: {self._advice(self.their_name(fullname) or fullname)}", name=fullname
        )


class _Metadata(Distribution):
    """The metadata of the replaced package."""

    def __init__(self, package: str, version: str) -> None:
        owner = "huggingface" if package == "accelerate" else "Lightning-AI"
        page = f"https://github.com/{owner}/{package}"  # sentence-transformers checks the home page of accelerate
        self._text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nHome-page: {page}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def defined(name: str) -> Any:
    """Make a small value or function that other packages define and instep does not; None for an unknown name."""
    if name in tables.DEFINED:
        imports, value = tables.DEFINED[name]
        made: dict[str, Any] = {}
        # The executed text comes from instep's own table, from which `instep migrate` also writes it into scripts.
        exec(f"{imports}\nvalue = {value}", made)
        found = made["value"]
        return (lambda *args, **kwargs: found()) if name.endswith("_available") else found
    if name.startswith("is_") and name.endswith(("_available", "_version")):
        return lambda *args, **kwargs: False  # such a function asks for a package or device that instep does not use
    if name.startswith(("_TORCH_GREATER_EQUAL_", "_TORCH_LESS_EQUAL_")):
        # instep needs a newer torch than all versions in these names, so only "greater" is true
        return name.startswith("_TORCH_GREATER")
    return None


def silently(key: str, text: str) -> None:
    """Ignore advice about an argument, since a program under `instep.compat` runs unchanged."""


class _Missing(type):
    """Metaclass of a stand-in for a name that the package has and instep does not; calling the stand-in raises."""

    advice: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(cls.advice)
