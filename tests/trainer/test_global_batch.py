from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SettingError
from instep.trainer.loaders import derive


@pytest.mark.parametrize(
    "global_batch, world, loader, expected",
    [
        (64, 1, 64, (64, 1)),
        (64, 2, 64, (32, 1)),
        (256, 4, 32, (32, 2)),
        (256, 1, 32, (32, 8)),
        (96, 2, 20, (16, 3)),
        (30, 1, 8, (6, 5)),
        (7, 1, 4, (1, 7)),
        (4, 4, 32, (1, 1)),
    ],
)
def test_table(global_batch, world, loader, expected):
    assert derive(global_batch, world, loader) == expected


@pytest.mark.parametrize(
    "global_batch, world, nearest", [(10, 4, "8 or 12"), (3, 8, "Nearest: 8"), (65, 2, "64 or 66")]
)
def test_what_does_not_divide_names_the_nearest_sizes(global_batch, world, nearest):
    with pytest.raises(SettingError, match=nearest) as caught:
        derive(global_batch, world, 32)
    assert (caught.value.field, caught.value.got) == ("global_batch_size", global_batch)


@given(per_rank=st.integers(1, 300), world=st.integers(1, 16), loader=st.integers(1, 64))
def test_the_split_is_exact_and_has_the_fewest_micro_batches(per_rank, world, loader):
    micro, accumulate = derive(per_rank * world, world, loader)
    assert micro * accumulate * world == per_rank * world
    assert micro <= loader
    assert all(per_rank % fewer or per_rank // fewer > loader for fewer in range(1, accumulate))
