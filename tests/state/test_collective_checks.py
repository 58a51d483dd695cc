"""Checked mode, over 2 and 3 processes; one start of the processes serves all tests of a world size."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from instep.distributed import (
    Triggers,
    all_reduce_,
    broadcast,
    broadcast_object,
    broadcast_object_list,
    gather,
    gather_object,
    gather_ragged,
    pad_across_processes,
    raise_together,
    reduce,
    wait_for_everyone,
)
from instep.errors import RemoteError, SettingError
from instep.state import PartialState, collective_checks
from tests.distributed.helpers import text_of
from tests.helpers.spawn import run_ranks

CHECKED = {"INSTEP_DEBUG": "1"}
DEADLINE = timedelta(seconds=300)


def test_a_process_alone_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_DEBUG", "1")
    assert PartialState().debug
    assert gather(torch.tensor(3.0)).tolist() == [3.0]
    assert gather_object({"a": 1}) == [{"a": 1}]
    wait_for_everyone()


def _alike(rank: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "gather": gather({"x": torch.tensor(rank)})["x"].tolist(),
        "ragged": gather_ragged(torch.full((rank,), rank)).tolist(),
        "reduce": int(reduce(torch.tensor(rank), "max")),
        "in place": all_reduce_(torch.tensor(1)).item(),
        "broadcast": int(broadcast(torch.tensor(rank), from_process=1)),
        "padded": len(pad_across_processes(torch.ones(rank))),
        "objects": gather_object(rank),
        "object": broadcast_object(rank, from_process=1),
    }
    triggers = Triggers(every=1)
    triggers.tick(1)
    if rank == 1:
        triggers.set("mine", "why")
    report["checked trigger"] = triggers.check("mine")
    triggers.set("late")
    report["ticks"] = [[trigger.rank for trigger in triggers.tick(step)] for step in (2, 3)]
    report["sync"] = triggers.sync()
    raise_together(None, "nothing")
    try:
        raise_together(OSError("full") if rank == 1 else None, "saving")
    except RemoteError as error:
        report["remote"] = error.rank
    except OSError as error:
        report["own"] = str(error)
    with PartialState().main_process_first():
        report["in turn"] = True
    with ExitStack() as stack:  # the one that goes first says so where the stack ends, the others where it is entered
        stack.enter_context(PartialState().main_process_first())
        report["in turn"] = True
    wait_for_everyone()
    return report


def _unlike(rank: int) -> dict[str, str]:
    odd = rank == 1
    one = torch.ones(1)
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: gather(torch.ones(2) if odd else one),
        "dtype": lambda: reduce(one.double() if odd else one),
        "keys": lambda: broadcast({"b" if odd else "a": one}),
        "in place": lambda: all_reduce_(torch.ones(2) if odd else one),
        "objects": lambda: gather_object(1) if odd else raise_together(None, "nothing"),
        "length": lambda: broadcast_object_list([1] * (1 + odd)),
        "source": lambda: broadcast_object(1, from_process=int(odd)),
        "barrier": lambda: wait_for_everyone() if odd else gather(one),
        "triggers": lambda: Triggers(every=1).sync() if odd else gather_object(1),
        "names": lambda: Triggers(every=1).check("a" if odd else "b"),
    }
    report = {name: text_of(call) for name, call in calls.items()}
    if odd:
        report["line"] = text_of(lambda: gather(one))
    else:
        report["line"] = text_of(lambda: gather(one))
    report["afterwards"] = str(gather(one).tolist())
    return report


def _first_and_not() -> list[str]:
    state = PartialState(cpu=True, timeout=300)

    def block() -> None:
        with state.main_process_first():
            pass

    return [text_of(block if state.is_main_process else lambda: gather_object(1)), text_of(block)]


@pytest.mark.dist
def test_a_block_of_one_process_first_is_told_from_other_calls() -> None:
    for text, afterwards in run_ranks(_first_and_not, 2, env=CHECKED):
        assert "rank 0: the block under main_process_first() at " in text
        assert f"{Path(__file__).name}:" in text
        assert "rank 1: gather_object at " in text
        assert afterwards == "no error"


def test_where_the_store_does_not_answer_nobody_is_declared_gone() -> None:
    class RankRecords:
        def read(self, number: int) -> dict[int, str]:
            raise RuntimeError("no answer")

    line = object.__new__(collective_checks._CallRecords)
    line._records, line._rank, line._world, line._count = RankRecords(), 0, 2, 1  # type: ignore[assignment]
    text = str(line._alone("gather at a.py:1", 8.0, RuntimeError("timed out")))
    assert text.startswith("gather at a.py:1: not everybody came; waited 8.0 s (timed out). Who did is not known")
    assert "is gone" not in text


def _everything() -> tuple[dict[str, Any], dict[str, str]]:
    rank = PartialState(cpu=True, timeout=300).process_index
    return _alike(rank), _unlike(rank)


Reports = list[tuple[dict[str, Any], dict[str, str]]]


@pytest.fixture(scope="module", params=[2, 3], ids="{}-processes".format)
def reports(request: pytest.FixtureRequest) -> Reports:
    return run_ranks(_everything, request.param, env=CHECKED)


@pytest.mark.dist
def test_ranks_that_agree_are_not_disturbed(reports: Reports) -> None:
    world = len(reports)
    for rank, (report, _) in enumerate(reports):
        assert report["gather"] == report["objects"] == list(range(world))
        assert report["ragged"] == [other for other in range(world) for _ in range(other)]
        assert report["reduce"] == report["padded"] == world - 1
        assert report["in place"] == world
        assert report["broadcast"] == report["object"] == 1
        assert report["checked trigger"]
        assert report["ticks"] == [[], [0]]
        assert report["sync"] == ()
        assert report.get("remote") == (None if rank == 1 else 1)
        assert report.get("own") == ("full" if rank == 1 else None)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "rank_0", "rank_1"),
    [
        ("shape", "tensor: torch.float32 (1,)", "tensor: torch.float32 (2,)"),
        ("dtype", "tensor: torch.float32 (1,)", "tensor: torch.float64 (1,)"),
        ("keys", "['a']: torch.float32 (1,)", "['b']: torch.float32 (1,)"),
        ("in place", "tensor: torch.float32 (1,)", "tensor: torch.float32 (2,)"),
        ("objects", "raise_together at ", "gather_object at "),
        ("length", "length 1", "length 2"),
        ("source", "(from_process=0) at ", "(from_process=1) at "),
        ("barrier", "gather at ", "wait_for_everyone(None) at "),
        ("triggers", "gather_object at ", "triggers: sync at "),
        ("names", "check_trigger('b') at ", "check_trigger('a') at "),
        ("line", "gather at ", "gather at "),
    ],
)
def test_the_rank_that_differs_is_named_on_all(reports: Reports, what: str, rank_0: str, rank_1: str) -> None:
    sites = set()
    for _, texts in reports:
        first, *by_rank = texts[what].split("\n")
        assert first.startswith("ranks disagree before a collective")
        if len(reports) > 2:
            assert "rank 1 differs from the others" in first
        assert len(by_rank) == len(reports) + 1
        assert rank_0 in by_rank[0]
        assert rank_1 in by_rank[1]
        assert all(f"{Path(__file__).name}:" in line for line in by_rank[:-1])
        sites.add((by_rank[0].partition(" at ")[2], by_rank[1].partition(" at ")[2]))
    assert len(sites) == 1, "the ranks tell unlike stories"
    if what == "line":
        assert len(set(sites.pop())) == 2


@pytest.mark.dist
def test_collectives_work_after_a_difference_between_ranks_was_found(reports: Reports) -> None:
    for _, texts in reports:
        assert texts["afterwards"] == str([1.0] * len(reports))


def _one_never_comes() -> str:
    state = PartialState(cpu=True, timeout=10)
    rank, world = state.process_index, state.num_processes
    store = _get_default_store()
    told = [f"told/{other}" for other in range(world)]
    gather_object("all")
    if rank == 1:
        store.wait(told[:1] + told[2:], DEADLINE)
    text = text_of(lambda: gather(torch.ones(1)))
    store.set(f"told/{rank}", "")
    store.wait(told, DEADLINE)
    state.destroy_process_group(abort=True)
    return text


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_with_what_it_did_last() -> None:
    texts = run_ranks(_one_never_comes, 3, env=CHECKED)
    for rank in (0, 2):
        first, *by_rank = texts[rank].split("\n")
        assert "rank 1 did not come; waited " in first
        assert first.startswith("gather at ")
        assert by_rank[0].startswith("  rank 0: gather at ")
        assert by_rank[1].startswith("  rank 1: not here; its last collective was gather_object at ")
        assert by_rank[2].startswith("  rank 2: gather at ")
        assert all(f"{Path(__file__).name}:" in line for line in by_rank)
    late = texts[1].split("\n")
    assert "gave up after " in late[1], "the rank that comes too late learns that nobody waits any more"
    assert "gave up after " in late[3]


def _switched_on_here_and_there() -> list[str]:
    rank = int(os.environ["RANK"])
    texts = []
    for debug in (rank == 1, True, False):
        try:
            state = PartialState(cpu=True, timeout=300, debug=debug)
            texts.append(text_of(lambda: gather_object(1) if rank == 1 else gather_object(2)) + str(state.debug))
            texts.append(text_of(lambda: gather_object(1) if rank == 1 else raise_together(None, "nothing"))[:14])
            state.destroy_process_group()
        except SettingError as error:
            texts.append(str(error))
    return texts


@pytest.mark.dist
def test_all_ranks_check_or_none() -> None:
    for texts in run_ranks(_switched_on_here_and_there, 2):
        assert texts[0].startswith("checked mode is on for rank 1 of 2 only")
        assert texts[1:] == ["no errorTrue", "ranks disagree", "no errorFalse", "ranks disagree"]


def _one_has_gone() -> str:
    state = PartialState(cpu=True, timeout=300)
    wait_for_everyone()
    if state.process_index == 1:
        state.destroy_process_group(abort=True)
        return ""
    text = text_of(lambda: gather_object("who is here"))
    state.destroy_process_group(abort=True)
    return text


@pytest.mark.dist
def test_a_rank_that_has_gone_is_named() -> None:
    text = run_ranks(_one_has_gone, 2, env=CHECKED)[0]
    assert "rank 1 did not come; waited " in text
    assert "rank 1: not here; its last collective was wait_for_everyone(None) at " in text
