"""Sizes of a pass, and what losses weigh by them, against sums that are written out."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pytest

from instep.data.plan import Plan, Share, gradient_correction, rank_weight, steps_in_phases, window_scale

Sizes = list[list[int]]
"""Samples of each rank, by batch."""


@dataclass
class Source:
    """One rank's source of batches, with a batch in hand."""

    plan: Plan
    world_size: int
    share: Share = field(default_factory=Share)


def draw_sizes(seed: int, ranks: int, batches: int) -> Sizes:
    """Draw sizes of batches; a rank may have no sample in one, but not all of them."""
    draw = random.Random(seed)
    sizes = [[draw.randrange(0, 4) for _ in range(ranks)] for _ in range(batches)]
    return [batch if any(batch) else [1] * ranks for batch in sizes]


def draw_values(seed: int, sizes: Sizes) -> list[list[list[float]]]:
    """Draw a loss for every sample; a rank without one replays a sample whose loss must not count."""
    draw = random.Random(seed)
    return [[[draw.uniform(-1, 1) for _ in range(size or 1)] for size in batch] for batch in sizes]


def windows(first: int, total: int, accumulate: int) -> list[list[int]]:
    """The batches of each window: those with one multiple of `accumulate` below or at them."""
    return [list(group) for _, group in groupby(range(first, total), key=lambda batch: batch // accumulate)]


def share_of(batch: Sequence[int], rank: int, last: bool) -> Share:
    return Share(batch[rank], sum(batch), last, (batch[rank], sum(batch)))


def window_gradient(sources: list[Source], shares: list[list[Share]], values: list, window: list[int], accumulate: int):
    """What a loop computes as the mean over a window: weighed, averaged over ranks, added up, corrected at its end."""
    total = 0.0
    for number in window:
        for rank, source in enumerate(sources):
            source.share = shares[number][rank]
            losses = values[number][rank]
            loss = sum(losses) / len(losses)
            total += loss * window_scale(source, number, accumulate) / len(sources)
    factors = {gradient_correction(source, window[-1], accumulate) for source in sources}
    assert len(factors) == 1, "alike on all ranks"
    return total * factors.pop()


def mean_of(values: list, sizes: Sizes, window: list[int]) -> float:
    """The mean over all samples that count in a window."""
    counted = [
        loss
        for number in window
        for losses, size in zip(values[number], sizes[number], strict=True)
        for loss in losses[:size]
    ]
    return sum(counted) / len(counted)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (1, 3), (3, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_sizes_known_beforehand_give_the_mean_over_the_samples(seed: int, ranks: int, accumulate: int, first: int):
    total = 8
    sizes = draw_sizes(seed, ranks, total)
    values = draw_values(seed, sizes)
    shares = [[share_of(batch, rank, at == total - 1) for rank in range(ranks)] for at, batch in enumerate(sizes)]
    sources = [
        Source(
            Plan(first, total, uniform_until=0, total_is_final=True, share_of=lambda at, rank=rank: shares[at][rank]),
            ranks,
        )
        for rank in range(ranks)
    ]
    for window in windows(first, total, accumulate):
        got = window_gradient(sources, shares, values, window, accumulate)
        assert got == pytest.approx(mean_of(values, sizes, window), abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 3), (2, 2), (4, 3)])
@pytest.mark.parametrize("first", [0, 1])
def test_sizes_seen_only_then_give_the_same_mean(seed: int, ranks: int, accumulate: int, first: int):
    total = 7
    sizes = draw_sizes(seed, ranks, total)
    values = draw_values(seed, sizes)
    shares = [[share_of(batch, rank, at == total - 1) for rank in range(ranks)] for at, batch in enumerate(sizes)]

    def seen(start: int, stop: int) -> list[int]:
        return [sum(batch) for batch in sizes[start:stop]]

    sources = [
        Source(Plan(first, None, uniform_until=0, total_is_final=False, sizes_seen=seen), ranks) for _ in range(ranks)
    ]
    for window in windows(first, total, accumulate):
        got = window_gradient(sources, shares, values, window, accumulate)
        assert got == pytest.approx(mean_of(values, sizes, window), abs=1e-12)


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [1, 4, 7])
@pytest.mark.parametrize(("exact", "known"), [(True, True), (False, True), (False, False)])
def test_batches_of_unknown_size_weigh_the_same(accumulate: int, total: int, exact: bool, known: bool):
    ranks, plan = 2, Plan(0, total if known else None, uniform_until=sys.maxsize, total_is_final=exact)
    sources = [Source(plan, ranks) for _ in range(ranks)]
    shares = [[Share(last=number == total - 1)] * ranks for number in range(total)]
    values = [[[float(number + rank)] for rank in range(ranks)] for number in range(total)]
    for window in windows(0, total, accumulate):
        mean = sum(number + 0.5 for number in window) / len(window)
        assert window_gradient(sources, shares, values, window, accumulate) == pytest.approx(mean)


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
def test_windows_end_with_the_pass_where_its_end_is_known(first: int, accumulate: int):
    total = 7
    plan = Plan(first, total, uniform_until=0, total_is_final=True)
    estimated = Plan(first, total, uniform_until=0, total_is_final=False)
    for window in windows(first, total, accumulate):
        for number in window:
            assert plan.window_of(number, accumulate) == (window[0], window[-1] + 1)
            full = number - number % accumulate + accumulate
            assert estimated.window_of(number, accumulate) == (window[0], full), "as if it were full"


def test_a_window_ends_with_the_rank_that_has_most():
    plan = Plan(0, 3, uniform_until=0, total_is_final=True, longest_total=5)
    assert [plan.window_of(number, 4) for number in (0, 2, 4)] == [(0, 4), (0, 4), (4, 5)]


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("even", [0, 3, 6, 8])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_full_batches_weigh_one_part_of_their_window(first: int, even: int, accumulate: int):
    total = 8
    ragged = [2 if number < even else number % 3 + 1 for number in range(total)]
    shares = [Share(size, size, False, (size, size)) for size in ragged]
    plan = Plan(first, total, uniform_until=even, total_is_final=True, share_of=shares.__getitem__)
    source = Source(plan, 1)
    full = plan.full_batches(accumulate)
    scales = [window_scale(source, number, accumulate) for number in range(first, full)]
    assert scales == [1 / accumulate] * len(scales)
    if first % accumulate:
        assert full == 0, "the first window is not whole"
    else:
        assert full % accumulate == 0
        assert full <= even < full + accumulate, "no whole window more is even"


def test_units_of_a_window_are_added_up_once():
    asked: list[int] = []

    def at(number: int) -> Share:
        asked.append(number)
        return Share(1, 2, False, (1, 2) if number != 2 else None)

    plan = Plan(0, 6, uniform_until=0, total_is_final=True, share_of=at)
    assert [plan.window_units(0, 3), plan.window_units(0, 3), plan.window_units(3, 6)] == [4, 4, 6]
    assert asked == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("total", "even", "uniform"),
    [(5, 5, True), (5, 6, True), (5, 4, False), (None, 5, False), (None, sys.maxsize, True), (5, sys.maxsize, True)],
)
def test_uniform_is_where_all_batches_are_even(total: int | None, even: int, uniform: bool):
    assert Plan(0, total, uniform_until=even, total_is_final=True).uniform is uniform


def test_the_weight_of_a_rank_is_its_share_of_the_samples():
    source = Source(Plan(0, 1, uniform_until=0, total_is_final=True), 4)
    assert rank_weight(source) == 1.0, "unknown: all weigh alike"
    for mine, weight in ((0, 0.0), (1, 0.5), (2, 1.0), (8, 4.0)):
        source.share = Share(mine, 8, True, (mine, 8))
        assert rank_weight(source) == weight


def test_a_last_window_of_one_batch_is_a_step_in_every_epoch() -> None:
    assert [steps_in_phases(5, epochs, {0: 2}) for epochs in (1, 2)] == [3, 6]
    assert steps_in_phases(5, 2, {0: 2, 4: 4}) == 5  # 2, 2, 1 and 2, then what is left of the second epoch
    assert steps_in_phases(5, 1, {0: 2, 2: 4}) == 3, "one batch is left where the windows change"
