"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.errors import DistributedError


def text_of(call: Callable[[], Any]) -> str:
    """The error that a call raises."""
    try:
        call()
    except DistributedError as error:
        return str(error)
    return "no error"
