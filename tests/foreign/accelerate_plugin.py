"""The pytest plug-in that runs a file of Accelerate's tests over instep; it writes as `lightning_plugin` does."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import accelerate_names
import pytest
from accelerate_public import internal_reasons
from lightning_plugin import (  # noqa: F401  (pytest finds hooks and fixtures here)
    clean_process,
    pytest_collectreport,
    pytest_pyfunc_call,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    select,
)

_ACCELERATE = Path(os.environ.get("FOREIGN_PATH", "."))


def pytest_configure(config: pytest.Config) -> None:
    accelerate_names.install(_ACCELERATE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # theirs has the same name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    select(items, _reasons)


def _reasons(item: pytest.Item) -> list[str]:
    found, parent, name = internal_reasons(item.path), getattr(item, "cls", None), item.originalname  # pyright: ignore
    keys = [f"{base.__name__}.{name}" for base in parent.__mro__] if parent else [name]
    parts = [key for key in found if any(_is_case(own, key) for own in keys)]
    return sorted({reason for part in parts for reason in found[part]})


def _is_case(own: str, defined: str) -> bool:
    """Tell whether a test is a case of a definition: `parameterized` adds to the names of classes and methods."""
    pattern = re.escape(defined).replace(r"\.", r"\w*\.") + r"_(use_|num_|\d)\w*"
    return own == defined or re.fullmatch(pattern, own) is not None
