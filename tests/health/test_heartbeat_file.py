from __future__ import annotations

import os
from pathlib import Path

import pytest

from instep.health import heartbeat_file
from instep.health.hang_report import NodeWatch, report, wait_until_said
from instep.health.heartbeat_file import (
    BATCH,
    COMPILES,
    LIMIT_MS,
    PHASE,
    PHASES,
    PID,
    RANK,
    SAID,
    SLOW,
    STEP,
    TURN,
    WAITS,
    HangDetector,
    HeartbeatFile,
)

LIMIT_S = 10.0


class Node:
    """Ranks of one node that all are in the middle of training, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 3) -> None:
        self.beats = HeartbeatFile.make(folder / "beats", count)
        self.now = 100.0
        monkeypatch.setattr(heartbeat_file.time, "monotonic", lambda: self.now)
        self.ranks = [self.beats.numbers(i) for i in range(count)]
        for rank, numbers in enumerate(self.ranks):
            numbers[RANK], numbers[PID], numbers[LIMIT_MS] = rank + 4, os.getpid(), int(1000 * LIMIT_S)
            self.enter(rank, "train")
            numbers[BATCH], numbers[STEP] = 7, 20
        self.watch = HangDetector(self.beats)
        self.watch.detect()

    def enter(self, rank: int, phase: str) -> None:
        numbers = self.ranks[rank]
        numbers[PHASE], numbers[BATCH] = PHASES.index(phase), -1
        numbers[TURN] += 1

    def hangs_after(self, seconds: float) -> bool:
        """Look every second."""
        hangs = False
        for _ in range(int(seconds)):
            self.now += 1.0
            hangs = self.watch.detect()
        return hangs


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_ranks_that_make_no_step_hang(node: Node) -> None:
    assert not node.hangs_after(LIMIT_S)
    for numbers in node.ranks:
        numbers[BATCH] += 1  # in the middle of an accumulation
    assert not node.hangs_after(LIMIT_S)
    node.ranks[1][STEP] += 1
    assert node.hangs_after(2)  # the others are behind it, and stood still


def test_a_rank_that_waits_for_a_slow_one_does_not_hang(node: Node) -> None:
    node.ranks[1][STEP] += 1  # it waits for the two others, which compile
    node.ranks[0][COMPILES] = node.ranks[2][COMPILES] = 1
    assert not node.hangs_after(LIMIT_S * SLOW)
    assert node.hangs_after(2)


def test_a_stopped_rank_hangs_though_the_others_are_in_a_slow_phase(node: Node) -> None:
    for rank in (0, 2):
        node.enter(rank, "save")  # where they wait for it
    assert not node.hangs_after(LIMIT_S)
    assert node.hangs_after(2)


@pytest.mark.parametrize("phase", ["start", "load", "save", "epoch", "end", "train"])
def test_what_is_no_step_may_take_longer(node: Node, phase: str) -> None:
    for rank in range(3):
        node.enter(rank, phase)  # of a loop the first batch
    assert not node.hangs_after(LIMIT_S * SLOW)
    assert node.hangs_after(2)


def test_nobody_watches_ranks_that_are_outside_or_have_not_begun(node: Node) -> None:
    node.ranks[0][LIMIT_MS] = 0
    node.ranks[0][STEP] -= 1  # behind: the others wait for it
    assert not node.hangs_after(1000)
    node.ranks[0][LIMIT_MS] = 1000
    node.beats.clear()
    assert not node.hangs_after(1000)


def test_a_rank_that_left_its_run_after_an_error_holds_up_the_others_until_it_ends(node: Node) -> None:
    node.ranks[0][PHASE], node.ranks[0][LIMIT_MS] = PHASES.index("end"), 0
    node.ranks[1][STEP] = node.ranks[2][STEP] = 21
    assert not node.hangs_after(LIMIT_S * SLOW)
    assert node.hangs_after(2)
    assert "rank 4 (pid" in (said := report(node.beats))
    assert "is out of its run after an error, and has not ended" in said
    for numbers in node.ranks:  # all caught it: what they do then is not a run
        numbers[LIMIT_MS], numbers[PHASE] = 0, PHASES.index("end")
    assert not node.hangs_after(1000)


def test_time_in_which_nobody_looked_does_not_count(node: Node) -> None:
    node.now += 1000.0
    assert not node.watch.detect()
    assert not node.hangs_after(LIMIT_S - 3)
    assert node.hangs_after(2)


def test_texts_are_kept_apart_and_cut_to_their_room(node: Node) -> None:
    node.beats.set_folder(0, "/a/folder")
    node.beats.set_where(0, "é" * 9000)
    node.beats.set_where(1, "long")
    node.beats.set_where(1, "x")
    assert node.beats.folder(0) == "/a/folder"
    assert set(node.beats.where(0)[:-1]) == {"é"}
    assert (node.beats.folder(1), node.beats.where(1)) == ("", "x")
    assert node.beats.read()[1].rank == 5
    assert HeartbeatFile(node.beats.path).read() == node.beats.read()


def test_the_report_says_who_is_behind_and_what_could_not_be_written(node: Node, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for rank, numbers in enumerate(node.ranks):
        node.beats.set_where(rank, f"here.py:{rank} in wait\n  File here\n")
        node.beats.set_folder(rank, str(blocked / "hang"))
        numbers[SAID] = 1
    node.ranks[2][STEP] = 19
    wait_until_said(node.beats, 60.0)
    text = report(node.beats)
    pid = node.ranks[2][PID]
    assert f"no step for 10 s. rank 6 (pid {pid}) hangs at step 19, phase train, in here.py:2 in wait." in text
    assert "rank 4, 5, 6 (main thread" in text.replace("ranks", "rank")
    assert "it could not be written" in text
    assert "NotADirectoryError" in text


def test_an_agent_believes_a_hangs_exit_code_only_with_a_report_and_collects_dumps(tmp_path: Path) -> None:
    watch = NodeWatch(tmp_path, 1)
    watch.reset()
    assert not watch.hangs(says_so=True)  # a program of its own that ends with 76
    watch.beats.numbers(0)[SAID] = 1
    assert watch.hangs(says_so=True)
    assert not watch.hangs(says_so=False)
    (tmp_path / "nccl_trace_rank_0").write_text("what NCCL's flight recorder writes")
    watch.beats.numbers(0)[PID] = os.getpid()
    watch.beats.set_folder(0, str(tmp_path / "run" / "hang"))
    report(watch.beats, tmp_path)
    assert (tmp_path / "run" / "hang" / "nccl_trace_rank_0").read_text().startswith("what NCCL")
    environment = watch.environment({})
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert f"{tmp_path / 'nccl_trace_rank_'}" in environment.values()
    assert "2000" in environment.values()
    environment = watch.environment({"TORCH_FR_BUFFER_SIZE": "7"})
    assert "TORCH_FR_BUFFER_SIZE" not in environment
    assert Path(environment["INSTEP_HEARTBEAT_FILE"]).parent == tmp_path


LONE, OTHERS = (
    "train.py:12 in training_step; last collective gloo:all_gather",
    "loop.py:77 in fit; last collective gloo:all_reduce",
)


@pytest.mark.parametrize(
    ("places", "behind", "first"),
    [
        ([OTHERS, OTHERS, LONE], [], "rank 6 (pid"),  # a barrier that one rank alone calls
        ([OTHERS, LONE, OTHERS], [1], "rank 5 (pid"),
        ([OTHERS, OTHERS, LONE], [0, 1], "rank 6 (pid"),  # it has left one out, and is ahead of the others
        ([LONE, OTHERS, OTHERS, OTHERS], [1, 2, 3], "rank 4 (pid"),
        ([OTHERS, OTHERS, OTHERS, LONE, LONE], [], "rank 7 (pid"),
    ],
)
def test_the_headline_of_a_hang_names_the_rank_that_waits_where_the_others_do_not(
    places: list[str], behind: list[int], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, count=len(places))
    for rank, place in enumerate(places):
        node.beats.set_where(rank, f"{place}\n  the stack")
        node.ranks[rank][SAID] = node.ranks[rank][WAITS] = 1
        node.ranks[rank][STEP] -= rank in behind
    headline = report(node.beats).partition("\n")[0]
    assert headline.partition("no step for 10 s. ")[2].startswith(first)
    assert "train.py:12 in training_step" in headline.partition("elsewhere")[0]


def test_of_two_ranks_that_wait_in_two_places_both_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, count=2)
    for rank, place in enumerate((OTHERS, LONE)):
        node.beats.set_where(rank, f"{place}\n  the stack")
        node.ranks[rank][SAID] = node.ranks[rank][WAITS] = 1
        node.ranks[rank][STEP] -= rank == 0
    headline = report(node.beats).partition("\n")[0]
    assert "in different places: rank 4 " in headline
    assert "; rank 5 " in headline
