"""Waits in the framework's own collectives: who is missing, who has ended, who came to another call."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _get_default_store

from instep.distributed import gather, gather_object
from instep.errors import DistributedError
from instep.state import PartialState
from instep.state.rank_records import ENDED_FILE, wait_for_start
from tests.distributed.helpers import text_of
from tests.helpers.spawn import HANG_S, run_ranks


def _different_calls() -> list[str]:
    PartialState(cpu=True, timeout=HANG_S)
    if PartialState().is_main_process:
        said = [text_of(lambda: gather_object(1)), text_of(lambda: PartialState().wait_for_everyone("the save"))]
    else:
        said = [text_of(lambda: gather(torch.ones(3))), text_of(lambda: gather_object(1))]
    return [*said, text_of(lambda: gather_object(1))]


@pytest.mark.dist
def test_ranks_that_come_to_different_calls_learn_it_and_can_go_on() -> None:
    of_rank_0, of_rank_1 = run_ranks(_different_calls, 2)
    assert "rank 0 in wait_for_everyone('the save'); rank 1 in gather_object" in of_rank_0[1]
    assert "rank 0: wait_for_everyone('the save')\n  rank 1: gather_object" in of_rank_1[1]
    for first, _, then in (of_rank_0, of_rank_1):
        assert "rank 0: gather_object" in first
        assert "rank 1: gather, tensor: torch.float32 (3,)" in first
        assert then == "no error"


def _one_stays_away() -> str:
    state = PartialState(cpu=True, timeout=15)
    store = _get_default_store()
    if state.is_last_process:
        store.wait(["given up"], timedelta(seconds=HANG_S))
        store.set("seen", "")
        return ""
    said = text_of(lambda: gather_object(1))
    store.set("given up", "")
    store.wait(["seen"], timedelta(seconds=HANG_S))  # it is in this process
    return said


@pytest.mark.dist
def test_a_rank_alone_in_a_collective_gets_an_error_with_the_missing_rank_and_its_own_place() -> None:
    said, _ = run_ranks(_one_stays_away, 2)
    assert "in gather_object at" in said
    assert "test_awaiting.py" in said
    assert "Missing: rank 1" in said


def test_who_builds_the_state_learns_that_another_rank_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ended").write_text(json.dumps({0: 0}))
    monkeypatch.setenv(ENDED_FILE, str(tmp_path / "ended"))
    with pytest.raises(DistributedError, match="Rank 0 has ended its program with success"):
        wait_for_start(HashStore(), 1, 2, 60.0)
