"""A stand-in for torchvision, so that timm's models can be tested beside a CPU build of torch.

timm imports torchvision at its start, for its transforms and data sets. The wheels of torchvision on PyPI are built for
torch with CUDA: beside another build `import torchvision` fails, and with it that of packages which look whether it is
installed (torchmetrics, transformers). So it is left out of the development environment.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """A module in which every name is a class of its own."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "InterpolationMode":  # without which timm does
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname.split(".")[0] == "torchvision" else None

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Let `import torchvision` give empty classes, where it is not installed."""
    if find_spec("torchvision") is None:
        sys.meta_path.append(_Finder())
