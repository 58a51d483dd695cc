"""Cutting a sequence into runs of about one size."""

from __future__ import annotations

from collections.abc import Sequence


def even_cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Return where to cut a sequence so that the largest run is as small as can be; no run is empty.

    Args:
        sizes: of the items, in order; at least `count` of them.
        count: the number of runs.

    Returns:
        The index of the first item of each run but the first.

    Example:
        >>> even_cuts([1, 1, 2, 4], 2)
        [3]
    """
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}
    for runs in range(1, count + 1):
        for end in range(runs, len(sizes) + 1):
            best[runs, end] = min(
                (max(best[runs - 1, start][0], sum(sizes[start:end])), [*best[runs - 1, start][1], start])
                for start in range(runs - 1, end)
                if (runs - 1, start) in best
            )
    return best[count, len(sizes)][1][1:]
