from __future__ import annotations

import math

import pytest

from instep.data import resolve_limit
from instep.errors import SettingError


@pytest.mark.parametrize(
    "limit, num_batches, expected",
    [
        (None, 7, 7),
        (1.0, 7, 7),
        (1, 7, 1),
        (10, 7, 7),
        (0, 7, 0),
        (0.0, 7, 0),
        (0.5, 7, 3),
        (0.5, 0, 0),
        (None, None, math.inf),
        (1.0, None, math.inf),
        (0.0, None, 0),
        (4, None, 4),
    ],
)
def test_a_limit_is_a_count_or_a_share_of_the_batches(
    limit: int | float | None, num_batches: int | None, expected: int | float
) -> None:
    assert resolve_limit(limit, num_batches, "limit_val_batches") == expected


@pytest.mark.parametrize("limit, num_batches", [(-1, 7), (1.5, 7), (-0.1, 7), (True, 7), ("1", 7), (0.5, None)])
def test_limits_that_are_no_count_and_no_share_are_refused(limit: int | float, num_batches: int | None) -> None:
    with pytest.raises(SettingError, match="limit_val_batches=") as caught:
        resolve_limit(limit, num_batches, "limit_val_batches")
    assert caught.value.field == "limit_val_batches"


@pytest.mark.parametrize("num_batches", [1, 3, 7, 64, 999, 123_456])
def test_a_fraction_below_one_batch_names_a_usable_one(num_batches: int) -> None:
    with pytest.raises(SettingError, match="less than one batch") as caught:
        resolve_limit(0.5 / num_batches, num_batches, "limit_val_batches")
    usable = float(str(caught.value).split("at least ")[1].split(",")[0])
    assert resolve_limit(usable, num_batches, "limit_val_batches") >= 1
