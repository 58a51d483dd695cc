from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from instep.utils.cuts import even_cuts


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_no_other_cuts_have_a_smaller_largest_run(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))

    def largest(cuts: tuple[int, ...] | list[int]) -> int:
        bounds = [0, *cuts, len(sizes)]
        assert all(a < b for a, b in pairwise(bounds))
        return max(sum(sizes[a:b]) for a, b in pairwise(bounds))

    found = even_cuts(sizes, count)
    assert len(found) == count - 1
    assert largest(found) == min(largest(cuts) for cuts in combinations(range(1, len(sizes)), count - 1))
