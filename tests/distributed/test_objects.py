from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.distributed import (
    broadcast_object,
    broadcast_object_list,
    control_group,
    gather_object,
    raise_together,
    wait_for_everyone,
)
from instep.errors import RemoteError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks


def test_a_process_alone() -> None:
    assert control_group() is None
    assert gather_object("text") == ["text"]
    thing = object()
    assert broadcast_object(thing) is thing
    items = [1, 2]
    assert broadcast_object_list(items) is items
    wait_for_everyone()
    raise_together(None, "nothing")
    with pytest.raises(KeyError, match="mine"):
        raise_together(KeyError("mine"), "something")


def _objects() -> dict[str, Any]:
    rank = PartialState(cpu=True, timeout=40).process_index
    items = [rank, {"rank": rank}]
    return {
        "dict": gather_object({"rank": rank, "x": torch.full((rank + 1,), rank)}),
        "text": gather_object("ab" * rank),
        "broadcast": broadcast_object({"rank": rank}, from_process=1),
        "list": broadcast_object_list(items, from_process=2) is items and items,
    }


@pytest.mark.dist
def test_objects_arrive_whole_and_in_rank_order() -> None:
    for report in run_ranks(_objects, 3):
        assert [entry["rank"] for entry in report["dict"]] == [0, 1, 2]
        assert [entry["x"].tolist() for entry in report["dict"]] == [[0], [1, 1], [2, 2, 2]]
        assert report["text"] == ["", "ab", "abab"]
        assert report["broadcast"] == {"rank": 1}
        assert report["list"] == [2, {"rank": 2}]


def _together(failing: tuple[int, ...]) -> tuple[str, str, int]:
    rank = PartialState(cpu=True, timeout=40).process_index
    error: BaseException | None = None
    try:
        if rank in failing:
            raise OSError(f"disk of {rank} is full")
    except OSError as caught:
        error = caught
    try:
        raise_together(error, "saving the checkpoint")
    except OSError as raised:
        wait_for_everyone()
        return "own" if raised is error else "copied", str(raised), rank
    except RemoteError as raised:
        wait_for_everyone()
        return "remote", str(raised), raised.rank
    wait_for_everyone()
    return "none", "", -1


@pytest.mark.dist
@pytest.mark.parametrize("failing", [(), (0,), (1,), (1, 2), (0, 1, 2)])
def test_an_error_of_any_rank_reaches_all(failing: tuple[int, ...]) -> None:
    for rank, (kind, text, where) in enumerate(run_ranks(_together, 3, failing)):
        if not failing:
            assert kind == "none"
        elif rank in failing:
            assert (kind, text, where) == ("own", f"disk of {rank} is full", rank)
        else:
            assert (kind, where) == ("remote", failing[0])
            assert text.startswith(f"saving the checkpoint failed on rank {failing[0]}")
            assert ("and on rank 2" in text) == (failing == (1, 2))
            assert f"OSError: disk of {failing[0]} is full" in text
