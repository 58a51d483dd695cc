from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from instep.checkpoint import CheckpointInfo, Manifest, scan
from instep.checkpoint.scan import best_first, check_keyword
from instep.errors import CheckpointError, SettingError


def checkpoint(step: int, **info: Any) -> CheckpointInfo:
    return CheckpointInfo(Path(f"step-{step:08d}-1"), step, 1, Manifest(step, 1, "", 1, "", {}, {}, info))


def scored(mode: str, *scores: float | None) -> list[CheckpointInfo]:
    found = [checkpoint(step, score=score, monitor="loss", mode=mode) for step, score in enumerate(scores)]
    return found[::-1]


@pytest.mark.parametrize(
    ("mode", "scores", "order"),
    [
        ("min", [0.3, 0.1, 0.2], [1, 2, 0]),
        ("max", [0.3, 0.1, 0.2], [0, 2, 1]),
        ("min", [0.0, -0.0], [0, 1]),
        ("max", [0.0, -0.0, 0.0], [0, 1, 2]),
        ("min", [math.nan, 5.0, math.nan], [1]),
        ("max", [math.nan], []),
        ("min", [math.inf, 1.0, -math.inf], [2, 1, 0]),
        ("max", [math.inf, 1.0, -math.inf], [0, 1, 2]),
        ("min", [None, 0.0], [1]),
        ("min", [1, 2], [0, 1]),
        ("min", [], []),
    ],
)
def test_checkpoints_are_ordered_by_their_score(mode: str, scores: list[float | None], order: list[int]) -> None:
    assert [c.step for c in best_first(scored(mode, *scores))] == order


def test_checkpoints_without_a_monitor_are_left_out() -> None:
    assert best_first([checkpoint(1), checkpoint(2, score=1.0)]) == []


def test_two_metrics_need_a_choice() -> None:
    found = [checkpoint(1, score=0.5, monitor="loss", mode="min"), checkpoint(2, score=0.9, monitor="acc", mode="max")]
    with pytest.raises(CheckpointError, match=r"acc \(max\), loss \(min\)"):
        best_first(found)
    assert [c.step for c in best_first(found, "acc")] == [2]
    assert best_first(found, "other") == []


def test_an_unknown_mode_and_keyword() -> None:
    with pytest.raises(CheckpointError, match="neither 'min' nor 'max'"):
        best_first(scored("lowest", 1.0))
    with pytest.raises(SettingError, match="names no checkpoint"):
        check_keyword("latest")


def test_a_checkpoint_is_full_unless_it_says_another_kind() -> None:
    assert checkpoint(1).kind == "full"
    assert checkpoint(1, kind="weights").kind == "weights"


def test_facts_are_remembered_of_the_folders_that_were_listed_last(tmp_path: Path) -> None:
    for number in range(40):
        scan.facts(tmp_path / str(number))
    assert list(scan._index)[-1] == str(tmp_path / "39")
    assert len(scan._index) <= 16
