"""Readers of other packages' checkpoints. Each is imported when needed, and none runs code from a file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

FOLDERS = ("zero", "dcp")
"""Files that read a folder of another package: `find_folder(path)`, then `open_folder(folder, roots)`."""


def find_foreign_folder(path: Path) -> tuple[ModuleType, Path] | None:
    """Return the reader for a folder of another package, and the folder with the weights; None if no reader fits."""
    readers = (import_module(f"{__name__}.{name}") for name in FOLDERS)
    return next(((reader, folder) for reader in readers if (folder := reader.find_folder(path)) is not None), None)


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save; see `torch_files.py`."""
    return resolve_name(f"{__name__}.torch_files:read_torch_file")(path)
