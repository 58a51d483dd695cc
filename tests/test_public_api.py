"""The public interface, as a text that is kept, and its docstrings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "public_api.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_api", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 writes signatures of enums in another way")
def test_the_interface_is_the_one_that_is_kept() -> None:
    script = _script()
    found, kept = script.interface().splitlines(), script.KEPT.read_text().splitlines()
    changed = [f"- {line}" for line in kept if line not in found] + [f"+ {line}" for line in found if line not in kept]
    assert found == kept, "\n".join([*changed, "meant? Then python scripts/public_api.py --write"])


def test_every_public_name_has_a_docstring_in_order() -> None:
    assert list(_script().faults()) == []
