"""The pytest plug-in that lets instep take Lightning Fabric's place in a run of Fabric's own tests.

    pytest --noconftest -p tests.foreign.fabric_plugin $(grep :: fabric_public.txt)    # in Lightning's folder `tests`

`INSTEP_STANDS_IN=0` runs the same tests with Lightning itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

_ABSENT = ("min_cuda_gpus", "mps", "tpu", "deepspeed", "standalone", "bf16_cuda")


def run_if(**needs: Any) -> Any:
    """Skip a test that needs a device or a package; this one knows no more than that there is a CPU."""
    absent = [name for name in _ABSENT if needs.get(name)]
    return pytest.mark.skipif(bool(absent), reason=f"needs {', '.join(absent)}")


_helper = ModuleType("tests_fabric.helpers.runif")
vars(_helper)["RunIf"] = run_if
sys.modules[_helper.__name__] = _helper

if os.environ.get("INSTEP_STANDS_IN") != "0":
    from instep.compat import fabric

    fabric.install()


@pytest.fixture(autouse=True)
def restore_environment() -> Iterator[None]:
    """Take away what a test left in the environment."""
    before = os.environ.copy()
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers that Lightning's own settings have."""
    for name in ("flaky", "cloud"):
        config.addinivalue_line("markers", f"{name}: of Lightning")
