from __future__ import annotations

import os
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from instep.data import DataLoaderConfiguration
from instep.errors import SettingError


def test_defaults_do_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = DataLoaderConfiguration()
    for name in list(os.environ):
        monkeypatch.delenv(name)
    assert DataLoaderConfiguration() == before
    assert (before.dispatch_batches, before.even_batches, before.data_seed) == (None, True, None)
    with pytest.raises(FrozenInstanceError):
        before.even_batches = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"split_batches": 1}, "split_batches=1: expected True or False"),
        ({"even_batches": None}, "even_batches=None: expected True or False"),
        ({"dispatch_batches": "yes"}, "dispatch_batches='yes': expected True or False"),
        ({"data_seed": True}, "data_seed=True: expected an integer, or None"),
    ],
)
def test_values_of_a_loader_configuration_are_checked(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingError, match=expected) as caught:
        DataLoaderConfiguration(**settings)
    assert caught.value.field == next(iter(settings))
