"""Objects and errors, over 2, 3 and 4 processes; one start of the processes serves all tests of a world size."""

from __future__ import annotations

from itertools import chain, combinations
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
from instep.errors import DistributedError, RemoteError, SettingError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks


def test_a_process_alone_gathers_and_broadcasts_to_itself() -> None:
    assert control_group() is None
    assert gather_object("text") == ["text"]
    assert gather_object(["a", "b"]) == ["a", "b"]
    assert gather_object((1, 2)) == [(1, 2)]
    thing = object()
    assert broadcast_object(thing) is thing
    items = [1, 2]
    assert broadcast_object_list(items) is items
    assert broadcast_object_list(items, from_process=1) is items
    wait_for_everyone()
    raise_together(None, "nothing")
    with pytest.raises(KeyError, match="mine"):
        raise_together(KeyError("mine"), "something")


def _objects(rank: int, world: int) -> dict[str, Any]:
    items = [rank, {"rank": rank}]
    report: dict[str, Any] = {
        "dict": gather_object({"rank": rank, "x": torch.full((rank + 1,), rank)}),
        "text": gather_object("ab" * rank),
        "lists": gather_object([rank] * rank),
        "broadcast": broadcast_object({"rank": rank}, from_process=1),
        "list": broadcast_object_list(items, from_process=world - 1) is items and items,
    }
    unequal = [rank] * (1 + (rank == 1))
    try:
        broadcast_object_list(unequal)
    except DistributedError as error:
        report["unequal"] = (str(error), unequal)
    calls = {"gathered": gather_object, "sent": lambda obj: broadcast_object(obj, from_process=1)}
    for name, call in calls.items():
        try:
            call((lambda: None) if rank == 1 else rank)
        except RemoteError as error:
            report[name] = error.rank, str(error)
        except Exception as error:
            report[name] = "own", str(error)
    report["afterwards"] = gather_object(rank)
    try:
        broadcast_object(0, from_process=world)
    except SettingError as error:
        report["no such rank"] = str(error)
    return report


def _together(rank: int, failing: tuple[int, ...]) -> tuple[str, str, int]:
    error: BaseException | None = None
    try:
        if rank in failing:
            raise OSError(f"disk of {rank} is full")
    except OSError as caught:
        error = caught
    try:
        raise_together(error, "saving the checkpoint")
    except OSError as raised:
        return "own" if raised is error else "copied", str(raised), rank
    except RemoteError as raised:
        return "remote", str(raised), raised.rank
    return "none", "", -1


def _who_fails(world: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(world), count) for count in range(world + 1)))


def _everything() -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
    state = PartialState(cpu=True, timeout=300)
    rank, world = state.process_index, state.num_processes
    report = _objects(rank, world)
    failures = [_together(rank, failing) for failing in _who_fails(world)]
    wait_for_everyone()
    return report, failures


Reports = list[tuple[dict[str, Any], list[tuple[str, str, int]]]]


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{}-processes".format)
def reports(request: pytest.FixtureRequest) -> Reports:
    return run_ranks(_everything, request.param)


@pytest.mark.dist
def test_a_dict_and_a_text_are_gathered_whole_and_in_rank_order(reports: Reports) -> None:
    ranks = list(range(len(reports)))
    for report, _ in reports:
        assert [entry["rank"] for entry in report["dict"]] == ranks
        assert [entry["x"].tolist() for entry in report["dict"]] == [[rank] * (rank + 1) for rank in ranks]
        assert report["text"] == ["ab" * rank for rank in ranks]
        assert report["lists"] == [rank for rank in ranks for _ in range(rank)]


@pytest.mark.dist
def test_objects_of_one_rank_reach_all(reports: Reports) -> None:
    last = len(reports) - 1
    for report, _ in reports:
        assert report["broadcast"] == {"rank": 1}
        assert report["list"] == [last, {"rank": last}]
        assert f"from_process={last + 1}: the job has {last + 1} processes" in report["no such rank"]


@pytest.mark.dist
def test_a_list_of_another_length_is_an_error_on_every_rank(reports: Reports) -> None:
    for rank, (report, _) in enumerate(reports):
        text, unequal = report["unequal"]
        assert "rank 0: broadcast_object_list(from_process=0), length 1\n" in text
        assert "rank 1: broadcast_object_list(from_process=0), length 2\n" in text
        assert unequal == [rank] * (1 + (rank == 1))


@pytest.mark.dist
@pytest.mark.parametrize(("name", "call"), [("gathered", "gather_object"), ("sent", "broadcast_object_list")])
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(reports: Reports, name: str, call: str) -> None:
    for rank, (report, _) in enumerate(reports):
        where, text = report[name]
        assert where == ("own" if rank == 1 else 1)
        assert "pickle" in text
        if rank != 1:
            assert text.startswith(f"{call}: pickling the object failed on rank 1\n\nTraceback of rank 1:\n")
        assert report["afterwards"] == list(range(len(reports)))


@pytest.mark.dist
def test_an_error_of_any_rank_reaches_all(reports: Reports) -> None:
    for rank, (_, failures) in enumerate(reports):
        for failing, (kind, text, where) in zip(_who_fails(len(reports)), failures, strict=True):
            if not failing:
                assert kind == "none"
            elif rank in failing:
                assert (kind, text, where) == ("own", f"disk of {rank} is full", rank)
            else:
                assert (kind, where) == ("remote", failing[0])
                assert text.startswith(f"saving the checkpoint failed on rank {failing[0]}")
                assert (f"and on rank {', '.join(map(str, failing[1:]))}" in text) == bool(failing[1:])
                assert f"OSError: disk of {failing[0]} is full" in text
