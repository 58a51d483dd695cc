"""Which checkpoints policies keep."""

from __future__ import annotations

import math
from typing import Any

import pytest

from instep.checkpoint import KeepAll, KeepAny, KeepBest, KeepEvery, KeepNewest, Retention, Saved
from instep.checkpoint.retention import modes
from instep.errors import SettingError

NAN, INF = math.nan, math.inf


def left(policy: Retention, scores: list[float | None], every: int = 10) -> list[int]:
    """Which are there in the end, where each is saved in turn and the policy deletes after it; by number from 0."""
    saved: list[Saved] = []
    for number, score in enumerate(scores):
        saved.append(Saved(str(number), (number + 1) * every, score))
        to_delete = policy.to_delete(saved)
        saved = [it for it in saved if it.key not in to_delete]
    return [int(it.key) for it in saved]


NO_SCORES: list[float | None] = [None] * 10


@pytest.mark.parametrize(
    ("policy", "scores", "expected"),
    [
        (KeepAll(), [None, 1, NAN], [0, 1, 2]),
        (KeepNewest(1), NO_SCORES, [9]),
        (KeepNewest(3), NO_SCORES, [7, 8, 9]),
        (KeepNewest(0), NO_SCORES, [9]),  # the newest stays, whatever the policy
        (KeepNewest(20), NO_SCORES, list(range(10))),
        (KeepEvery(30), NO_SCORES, [2, 5, 8, 9]),  # steps 30, 60, 90 and the newest
        (KeepEvery(25), NO_SCORES, [2, 4, 7, 9]),  # the first at or after 25, 50, 75 and 100
        (KeepEvery(10), NO_SCORES, list(range(10))),
        (KeepNewest(2) | KeepEvery(40), NO_SCORES, [3, 7, 8, 9]),
        (KeepBest(0), [3, 1, 2], [2]),
        (KeepBest(1), [3, 1, 2], [1, 2]),
        (KeepBest(1, "max"), [3, 1, 2], [0, 2]),
        (KeepBest(2), [3, 1, 2, 9], [1, 2, 3]),
        (KeepBest(1), [NAN, 5, NAN], [1, 2]),
        (KeepBest(1, "max"), [5, NAN, NAN], [0, 2]),
        (KeepBest(2), [NAN, NAN, NAN], [0, 1, 2]),  # among equals the older stays
        (KeepBest(2), [NAN, NAN, 7, NAN], [0, 2, 3]),
        (KeepBest(1), [INF, 1e30, NAN], [1, 2]),
        (KeepBest(1), [-INF, 0.0], [0, 1]),
        (KeepBest(1, "max"), [INF, NAN, 3], [0, 2]),
        (KeepBest(1), [NAN, INF, NAN], [1, 2]),
        (KeepBest(1), [0.0, -0.0, 1], [0, 2]),
        (KeepBest(1, "max"), [-0.0, 0.0, -1], [0, 2]),
        (KeepBest(2), [1, 1, 1, 2], [0, 1, 3]),
        (KeepBest(1), [None, None, 4, None], [2, 3]),  # not measured is not ranked
        (KeepBest(1) | KeepNewest(2), [1, 2, 3, 4], [0, 2, 3]),
        (KeepBest(1) | KeepEvery(30), [5, 1, 5, 5], [1, 2, 3]),
    ],
)
def test_a_retention_policy_keeps_the_expected_steps(
    policy: Retention, scores: list[float | None], expected: list[int]
):
    assert left(policy, scores) == expected


@pytest.mark.parametrize(
    ("policy", "score", "taken"),
    [
        (KeepBest(2), 3.0, False),  # like the worst of those kept: the older stays
        (KeepBest(2), 2.9, True),
        (KeepBest(2), NAN, False),
        (KeepBest(2), None, False),
        (KeepBest(2, "max"), 1.5, True),
        (KeepBest(3), NAN, True),  # a place is free
        (KeepBest(0), 0.0, False),
        (KeepNewest(1), None, True),
        (KeepNewest(0), None, False),
        (KeepEvery(100), None, False),
        (KeepEvery(15), None, True),
        (KeepEvery(100) | KeepBest(2), 0.0, True),
    ],
)
def test_a_retention_policy_takes_a_score_that_would_be_kept(policy: Retention, score: float | None, taken: bool):
    assert policy.takes(Saved("new", 30, score), [Saved("a", 10, 1.0), Saved("b", 20, 3.0)]) is taken


def test_a_second_save_of_a_step_does_not_replace_the_first_for_ever():
    saved = [Saved("step-100-1", 100), Saved("step-100-2", 100), Saved("step-120-1", 120)]
    assert KeepEvery(50).to_delete(saved) == ["step-100-2"]


def test_nothing_is_doomed_among_none():
    assert [policy.to_delete([]) for policy in (KeepAll(), KeepNewest(1), KeepBest(1), KeepEvery(1))] == [[]] * 4


def test_unions_are_flat_and_know_their_modes():
    joined = KeepNewest(1) | KeepBest(2, "max") | KeepEvery(5)
    assert joined == KeepAny((KeepNewest(1), KeepBest(2, "max"), KeepEvery(5)))
    assert modes(joined) == {"max"}
    assert modes(KeepNewest(1)) == set()


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (KeepNewest, (-1,), r"KeepNewest\(count=-1\)"),
        (KeepNewest, (2.5,), r"count=2.5"),
        (KeepNewest, (True,), r"count=True"),
        (KeepEvery, (0,), r"KeepEvery\(steps=0\): an integer of at least 1"),
        (KeepBest, (1, "lowest"), r"mode='lowest'"),
    ],
)
def test_wrong_arguments_of_retention_policies_are_refused(make: Any, arguments: tuple[Any, ...], message: str):
    with pytest.raises(SettingError, match=message):
        make(*arguments)
