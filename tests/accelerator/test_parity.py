"""A handwritten loop with the Accelerator and the Trainer are one thing: the same bits come out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.loops import Case, both, by_hand
from tests.helpers.spawn import run_ranks

CASES = [Case(accumulate=1), Case(accumulate=4), Case(accumulate=4, clip=None), Case(accumulate=3, dropout=0.0)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loop_and_the_trainer_end_with_the_same_bits(case: Case) -> None:
    hand, trainer = both(case)
    assert hand == trainer


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_so_they_do_on_two_processes(case: Case) -> None:
    for hand, trainer in run_ranks(both, 2, case):
        assert hand == trainer


@pytest.mark.parametrize("stop_after", [2, 3])  # in the middle of the first epoch, and at its end
@pytest.mark.parametrize("case", [Case(), Case(accumulate=2), Case(workers=2)], ids=str)
def test_a_resumed_loop_ends_with_the_same_bits(case: Case, stop_after: int, tmp_path: Path) -> None:
    by_hand(case, stop_after=stop_after, save=tmp_path / "state")
    assert by_hand(case, resume=tmp_path / "state") == by_hand(case)


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case(), Case(accumulate=2)], ids=str)
def test_so_it_does_on_two_processes(case: Case, tmp_path: Path) -> None:
    run_ranks(by_hand, 2, case, 2, None, tmp_path / "state")
    assert run_ranks(by_hand, 2, case, None, tmp_path / "state") == run_ranks(by_hand, 2, case)
