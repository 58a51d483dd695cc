"""Find the callbacks that other installed packages add to every Trainer through Python entry points."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from instep.callbacks.base import Callback
from instep.errors import SettingError
from instep.utils.checks import read_flag

EXTERNAL = "instep.callbacks_factory"
"""Group of entry points with which installed packages add callbacks to every Trainer."""
_EXTERNAL_OFF = "INSTEP_EXTERNAL_CALLBACKS"


def external_callbacks() -> list[Callback]:
    """Make the callbacks of installed packages, by calling the function that each entry point names.

    Raises:
        SettingError: a function cannot be imported, raises, or returns neither a callback nor a list or tuple of
            them. The message names the package.
    """
    switch = os.environ.get(_EXTERNAL_OFF, "1")
    try:
        if not read_flag(switch):
            return []
    except ValueError:
        raise SettingError(f"{_EXTERNAL_OFF}={switch!r}: expected 1 or 0", field=_EXTERNAL_OFF, got=switch) from None
    found: list[Callback] = []
    for entry in _external(tuple((path, _changed(path)) for path in sys.path)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "?"
        told = f"the entry point {entry.name} = {entry.value} of the installed package {package}"
        advice = f"Mend or uninstall the package, or set {_EXTERNAL_OFF}=0 to do without all such callbacks."
        try:
            made = entry.load()()
        except Exception as error:
            raise SettingError(
                f"{told} (group {EXTERNAL}) made no callback: {type(error).__name__}: {error}. {advice}",
                field="callbacks",
            ) from error
        several = list(made) if isinstance(made, list | tuple) else [made]
        for callback in several:
            if not isinstance(callback, Callback):
                raise SettingError(
                    f"{told} (group {EXTERNAL}) returned {callback!r}, which is no Callback. {advice}",
                    field="callbacks",
                    got=callback,
                )
            callback._origin = f"of {package}"
        found += several
    return found


@lru_cache(maxsize=1)
def _external(_: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Find the entry points of callbacks. This takes 4 ms, so it is repeated only if a folder of `sys.path` changes."""
    return tuple(entry_points(group=EXTERNAL))


def _changed(path: str) -> int:
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:  # the folder does not exist
        return 0
