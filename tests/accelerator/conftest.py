"""What the tests of the Accelerator share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from instep import Accelerator


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes Accelerators on the CPU, and ends their runs."""
    made: list[Accelerator] = []

    def make(**settings: Any) -> Accelerator:
        made.append(Accelerator(cpu=True, **settings))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.free_memory()
