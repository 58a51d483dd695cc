"""Waiting for everyone: who is missing, who waits for something else, and that it costs nothing otherwise."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.errors import SettingError
from instep.state import PartialState, barriers, process
from tests.helpers.spawn import run_ranks


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _one_stays_away() -> list[str]:
    state = PartialState(cpu=True, timeout=300)
    state.wait_for_everyone("the start")
    if state.is_last_process:
        for rank in range(2):  # stay away until the others have given up
            dist.recv(torch.zeros(1), src=rank)
        report = [error_of(state.wait_for_everyone, "the download")]  # late: nobody waits, but the others had come
    else:
        report = [error_of(state.wait_for_everyone, "the download", timeout_s=5)]
        dist.send(torch.zeros(1), dst=2)
    return [*report, error_of(state.wait_for_everyone, "the end")]


def _one_stays_away_in_checked_mode() -> list[str]:
    os.environ["INSTEP_DEBUG"] = "1"
    return _one_stays_away()


@pytest.mark.dist
def test_every_rank_that_waits_says_who_is_missing_and_what_the_others_wait_for() -> None:
    *waiting_ranks, late = run_ranks(_one_stays_away, 3)
    for rank, (given_up, afterwards) in enumerate(waiting_ranks):
        assert f"rank {rank} is in wait_for_everyone('the download'), and not everybody came within 5 s" in given_up
        assert f"Missing: rank 2 (on {os.uname().nodename})" in given_up
        assert "Waiting: rank 0, 1 under 'the download'" in given_up
        assert given_up.startswith("DistributedError")
        assert afterwards == "no error"  # waits still pair: the late rank met what the others had left behind
    assert late == ["no error", "no error"]


@pytest.mark.dist
def test_checked_mode_says_so_in_its_own_words_and_waits_still_pair() -> None:
    reports = run_ranks(_one_stays_away_in_checked_mode, 3)
    for given_up, afterwards in reports[:2]:
        assert "wait_for_everyone('the download')" in given_up
        assert "rank 2 did not come" in given_up
        assert afterwards == "no error"
    assert reports[2] == ["no error", "no error"]


def _one_is_slow() -> list[str]:
    state = PartialState(cpu=True, timeout=300)
    said: list[str] = []
    if state.is_main_process:

        def say(text: str, *_: Any) -> None:
            said.append(text)
            dist.send(torch.zeros(1), dst=1)

        barriers._SAY_AFTER_S = 1.0
        barriers.warn_user = say  # type: ignore[assignment]
    else:
        dist.recv(torch.zeros(1), src=0)
    state.wait_for_everyone("the download")
    return said


@pytest.mark.dist
def test_who_waits_for_long_says_for_whom_and_goes_on() -> None:
    said, nothing = run_ranks(_one_is_slow, 2)
    assert len(said) == 1
    assert said[0].startswith(
        "rank 0 is in wait_for_everyone('the download'), and still waits after 1 s. Missing: rank 1"
    )
    assert nothing == []


def _different_names() -> list[str]:
    state = PartialState(cpu=True, timeout=300)
    name = "loading" if state.process_index == 1 else "saving"
    report = [error_of(state.wait_for_everyone, name)]
    report.append(error_of(state.wait_for_everyone, None if state.is_main_process else "saving"))
    state.wait_for_everyone("saving")
    return report


@pytest.mark.dist
def test_waiting_under_different_names_is_an_error_that_names_both_on_every_rank() -> None:
    for names, none in run_ranks(_different_names, 3):
        assert names.startswith("DistributedError")
        assert "rank 0, 2 in wait_for_everyone('saving'); rank 1 in wait_for_everyone('loading')" in names
        assert "rank 0 in wait_for_everyone(); rank 1, 2 in wait_for_everyone('saving')" in none


def _one_ends() -> str:
    state = PartialState(cpu=True, timeout=300)
    if state.process_index == 1:
        dist.recv(torch.zeros(1), src=0)
        return ""
    dist.send(torch.zeros(1), dst=1)
    return error_of(state.wait_for_everyone, "the end")


@pytest.mark.dist
def test_a_rank_that_ends_is_missed_at_once() -> None:
    text = run_ranks(_one_ends, 2)[0]
    assert "rank 0 is in wait_for_everyone('the end'), and the connection to another process broke" in text
    assert "Missing: rank 1" in text


def _in_the_users_group() -> str:
    dist.init_process_group("gloo")  # its store outlives what the state makes of it
    state = PartialState(cpu=True)
    barriers._write(process.held().groups, 9, "long ago")  # type: ignore[arg-type]
    state.destroy_process_group()
    state = PartialState(cpu=True)
    if state.process_index == 1:
        dist.recv(torch.zeros(1), src=0)
        return ""
    text = error_of(state.wait_for_everyone, "the end", timeout_s=5)
    dist.send(torch.zeros(1), dst=1)
    return text


@pytest.mark.dist
def test_a_wait_of_an_earlier_state_in_the_same_group_does_not_count() -> None:
    assert "Missing: rank 1" in run_ranks(_in_the_users_group, 2)[0]


def _in_time() -> int:
    state = PartialState(cpu=True, timeout=300)
    barriers._MOMENT_S = 300.0  # however busy this machine is
    books: list[Any] = []
    barriers._write = lambda *args: books.append(args)  # type: ignore[assignment]
    for number in range(20):
        state.wait_for_everyone(f"turn {number}")
        state.wait_for_everyone()
    return len(books)


@pytest.mark.dist
def test_the_store_is_left_alone_while_everybody_is_in_time() -> None:
    assert run_ranks(_in_time, 2) == [0, 0]


def _time_outs() -> list[str]:
    state = PartialState(cpu=True, timeout=300)
    return [error_of(state.wait_for_everyone, timeout_s=value) for value in (0, -1, float("nan"), 301, 300)]


@pytest.mark.dist
def test_a_time_out_that_cannot_hold_is_refused_before_waiting() -> None:
    for zero, negative, nan, longer, equal in run_ranks(_time_outs, 2):
        for text in (zero, negative, nan):
            assert text.startswith("SettingError: timeout_s=")
        assert "ends after 300 s" in longer
        assert "PartialState(timeout=301)" in longer
        assert equal == "no error"


def test_a_process_alone_waits_for_nobody() -> None:
    PartialState(cpu=True).wait_for_everyone("nothing", timeout_s=1)


def test_the_default_is_a_little_shorter_than_the_groups() -> None:
    class Groups:
        timeout = timedelta(seconds=40)

    assert barriers._limit(Groups(), None) == 36  # type: ignore[arg-type]
    with pytest.raises(SettingError):
        barriers._limit(Groups(), 41)  # type: ignore[arg-type]
