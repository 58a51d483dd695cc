"""One process first: nested blocks, errors in a body, errors on the first process of another node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from instep.distributed import gather_object
from instep.state import PartialState
from tests.helpers.spawn import run_ranks


def state_on_two_nodes(local_world_size: int = 2) -> PartialState:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_WORLD_SIZE=str(local_world_size), LOCAL_RANK=str(rank % local_world_size))
    return PartialState(cpu=True, timeout=300)


def outcome(first: Any, body: Any) -> tuple[bool, str]:
    """Whether the body ran, and the error that came out."""
    ran = False
    try:
        with first():
            ran = True
            body()
    except Exception as error:
        return ran, f"{type(error).__name__}: {error}"
    return ran, ""


def fail(text: str) -> None:
    raise ValueError(text)


# The main process.


def _nested(folder: str) -> list[Any]:
    state = PartialState(cpu=True, timeout=300)
    file = Path(folder) / "file"
    report: list[Any] = []
    with state.main_process_first():
        with state.main_process_first(), state.local_main_process_first():
            pass
        if state.is_main_process:
            file.write_text("whole")  # after the inner blocks: the others must not have begun the outer one
        report.append(file.read_text())

    def inner() -> None:
        with state.main_process_first():
            fail(f"from rank {state.process_index}")

    report.append(outcome(state.main_process_first, inner))
    report.append(outcome(state.main_process_first, lambda: None))
    report.append(gather_object(state.process_index))
    return report


@pytest.mark.dist
def test_an_inner_block_changes_nothing_and_its_error_is_the_outer_blocks(tmp_path: Path) -> None:
    main, *others = run_ranks(_nested, 3, str(tmp_path))
    assert main == ["whole", (True, "ValueError: from rank 0"), (True, ""), [0, 1, 2]]
    for text, (ran, error), again, collective in others:
        assert (text, ran, again, collective) == ("whole", False, (True, ""), [0, 1, 2])
        assert error.startswith("RemoteError: the block under main_process_first() failed on rank 0")


def _error_on_a_follower() -> list[Any]:
    state = PartialState(cpu=True, timeout=300)
    report: list[Any] = []
    for first in (state.main_process_first, state.local_main_process_first):
        report.append(outcome(first, lambda: None if state.is_main_process else fail("mine")))
        report.append(gather_object(state.process_index))
    return report


@pytest.mark.dist
def test_an_error_of_one_that_goes_later_is_its_own_and_collectives_still_pair() -> None:
    main, other = run_ranks(_error_on_a_follower, 2)
    assert main == [(True, ""), [0, 1]] * 2
    assert other == [(True, "ValueError: mine"), [0, 1]] * 2


# The first process of each of two nodes.


def _on_another_node() -> list[Any]:
    state = state_on_two_nodes()
    report: list[Any] = []
    fails = state.process_index == 2
    report.append(outcome(state.local_main_process_first, lambda: fail("no space left") if fails else None))
    report.append(outcome(state.local_main_process_first, lambda: None))
    report.append(gather_object(state.process_index))
    return report


@pytest.mark.dist
def test_an_error_on_the_first_process_of_another_node_reaches_every_process() -> None:
    reports = run_ranks(_on_another_node, 4)
    assert [report[0][0] for report in reports] == [True, False, True, False]
    assert reports[2][0][1] == "ValueError: no space left"
    for rank in (0, 1, 3):
        error = reports[rank][0][1]
        assert error.startswith("RemoteError: the block under local_main_process_first() failed on rank 2")
        assert "ValueError: no space left" in error
    for report in reports:
        assert report[1:] == [(True, ""), [0, 1, 2, 3]]


def _nested_otherwise() -> list[Any]:
    state = state_on_two_nodes(local_world_size=1)

    def inner() -> None:
        with state.local_main_process_first():
            pass

    return [outcome(state.main_process_first, inner), gather_object(state.process_index)]


@pytest.mark.dist
def test_blocks_of_two_kinds_over_several_nodes_are_refused_and_not_a_hang() -> None:
    (main, *_), (other, collective) = run_ranks(_nested_otherwise, 2)
    assert main[1].startswith("UsageError: local_main_process_first() inside main_process_first()")
    assert other[1].startswith("RemoteError")
    assert collective == [0, 1]


def test_a_process_alone_runs_every_block() -> None:
    state = PartialState(cpu=True)
    with state.main_process_first(), state.local_main_process_first(), state.main_process_first():
        pass
    assert outcome(state.main_process_first, lambda: fail("mine")) == (True, "ValueError: mine")
    assert outcome(state.local_main_process_first, lambda: None) == (True, "")
