"""The loops that are compared. Each module has `train(case, loader, root)`, which trains one epoch in one of the CASES.

`train` returns a function that saves a checkpoint into a new folder, to be timed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CASES = ("bare", "log", "everything")

NAMES = {
    "handwritten": "torch",
    "instep": "instep",
    "accelerator": "instep",
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "ignite": "ignite",
    "transformers": "transformers",
}
"""Contenders and the package that each needs; "accelerator" is instep's, "accelerate" the peer's."""

Save = Callable[[Path], Any]


def installed(names: list[str]) -> list[str]:
    """Those of the names whose package is here; a line for each that is left out."""
    here = []
    for name in names:
        if find_spec(NAMES[name]) is None:
            print(f"{name}: left out, {NAMES[name]!r} is not installed (pip install 'instep[bench]')")
        else:
            here.append(name)
    return here


def load(name: str) -> Callable[[str, Any, Path], Save]:
    """The contender's `train`."""
    return import_module(f"contenders.{name}_run").train
