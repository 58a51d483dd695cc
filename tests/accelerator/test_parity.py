"""A handwritten loop with the Accelerator and the Trainer are one thing: the same bits come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.loops import Case, both, by_hand
from tests.helpers.spawn import run_ranks

CASES = [Case(accumulate=1), Case(accumulate=4), Case(accumulate=4, clip=None), Case(accumulate=3, dropout=0.0)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loop_and_the_trainer_end_with_the_same_bits(case: Case) -> None:
    hand, trainer = both(case)
    assert hand == trainer


def both_of_two() -> list[Any]:
    return [both(case) for case in CASES[:2]]


@pytest.mark.dist
def test_loop_and_trainer_agree_on_two_processes() -> None:
    for rank in run_ranks(both_of_two, 2):
        for hand, trainer in rank:
            assert hand == trainer


@pytest.mark.parametrize("stop_after", [2, 3])  # in the middle of the first epoch, and at its end
@pytest.mark.parametrize("case", [Case(), Case(accumulate=2), Case(workers=2)], ids=str)
def test_a_resumed_loop_ends_with_the_same_bits(case: Case, stop_after: int, tmp_path: Path) -> None:
    by_hand(case, stop_after=stop_after, save=tmp_path / "state")
    assert by_hand(case, resume=tmp_path / "state") == by_hand(case)


TWO = [Case(), Case(accumulate=2)]


def stopped(folder: Path) -> None:
    for number, case in enumerate(TWO):
        by_hand(case, stop_after=2, save=folder / f"state-{number}")


def resumed_and_whole(folder: Path) -> list[Any]:
    return [(by_hand(case, resume=folder / f"state-{number}"), by_hand(case)) for number, case in enumerate(TWO)]


@pytest.mark.dist
def test_a_resumed_loop_equals_an_uninterrupted_one_on_two_processes(tmp_path: Path) -> None:
    run_ranks(stopped, 2, tmp_path)
    for rank in run_ranks(resumed_and_whole, 2, tmp_path):
        for resumed, whole in rank:
            assert resumed == whole
