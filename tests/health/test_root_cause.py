from __future__ import annotations

import pytest

from instep.health.error_report import FailureReport
from instep.health.root_cause import RankEnd, find_cause

OWN = FailureReport("ValueError: x\nmore", "Traceback ...", time_ns=5, step=7)
EARLIER = FailureReport("ValueError: y", "", time_ns=3)
BROKEN = FailureReport("RuntimeError: Connection closed by peer", "", remote=True, time_ns=1)


def end(rank: int, code: int = 1, report: FailureReport | None = None, node: int = 0, first: bool = True) -> RankEnd:
    return RankEnd(rank, node, f"host{node}", code, first, report)


@pytest.mark.parametrize(
    ("ends", "alarmed", "cause"),
    [
        ([end(0, report=BROKEN), end(1, -9)], 0, 1),
        ([end(0, report=BROKEN), end(1, -15, first=False), end(2, report=OWN)], 0, 2),
        ([end(0, report=OWN), end(1, report=EARLIER)], 0, 1),
        ([end(0, report=EARLIER), end(1, report=OWN, node=1)], 1, 1),  # clocks of two nodes cannot be compared
        ([end(0, report=BROKEN), end(1, -9, node=1)], 0, 1),
        ([end(0, 75), end(1, 3)], 0, 1),
        ([end(0, 75)], 0, None),
        ([end(0, report=BROKEN), end(1, report=BROKEN, node=1)], 1, 1),
        ([], 0, None),
    ],
)
def test_the_cause_is_found_among_its_consequences(ends: list[RankEnd], alarmed: int, cause: int | None) -> None:
    found = find_cause(ends, alarmed)
    assert (None if found is None else found.rank) == cause


def test_an_end_tells_who_and_how_and_travels_without_its_traceback() -> None:
    told = end(3, report=OWN, node=1)
    assert (told.title, told.how, told.message) == ("rank 3 (host host1, step 7)", "exit code 1", "ValueError: x")
    back = RankEnd.from_json(told.as_json())
    assert back.report is not None
    assert (back.title, back.report.traceback) == (told.title, "")
    assert end(0, -11).how == "SIGSEGV"
    assert "out of memory" in end(0, -9).how
    assert end(0, -99).how == "signal 99"


def test_a_killed_rank_is_told_with_the_step_of_its_heartbeat() -> None:
    assert RankEnd(1, 0, "host", -9, True, steps=3).title == "rank 1 (host host, step 3)"
