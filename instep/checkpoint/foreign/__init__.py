"""Read checkpoints of torch.save, torch.distributed.checkpoint and DeepSpeed, without running code from a file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

FOLDERS = ("zero", "dcp")
"""Modules that read a folder of another package: each has `find_folder(path)` and `open_folder(folder, roots)`."""


def find_foreign_folder(path: Path) -> tuple[ModuleType, Path] | None:
    """Find the module that can read another package's folder, and the folder of the weights; None if no module can."""
    readers = (import_module(f"{__name__}.{name}") for name in FOLDERS)
    return next(((reader, folder) for reader in readers if (folder := reader.find_folder(path)) is not None), None)


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save on the CPU, without running code from it; see `torch_files.read_torch_file`."""
    return resolve_name(f"{__name__}.torch_files:read_torch_file")(path)
