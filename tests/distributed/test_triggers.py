from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.distributed import Trigger, Triggers, gather_object, triggers
from instep.errors import DistributedError, SettingError
from instep.state import PartialState
from tests.helpers import gpu
from tests.helpers.spawn import run_ranks

EVERY = 4


def train(
    own: Triggers, steps: int, set_at: dict[int, tuple[str, str]], start: int = 0
) -> dict[int, tuple[Trigger, ...]]:
    """Steps of a loop that sets triggers after some of them; what was agreed, by step."""
    agreed: dict[int, tuple[Trigger, ...]] = {}
    for step in range(start + 1, start + steps + 1):
        got = own.tick(step)
        if got:
            agreed[step] = got
        if step in set_at:
            own.set(*set_at[step])
    return agreed


# One process.


@pytest.mark.parametrize(("set_at", "agreed_at"), [(1, 9), (4, 9), (5, 13), (8, 13), (9, 17)])
def test_what_is_set_before_a_boundary_is_agreed_at_the_next_one(set_at: int, agreed_at: int) -> None:
    own = Triggers(every=EVERY)  # boundaries at 1, 5, 9, 13
    agreed = train(own, 30, {set_at: ("stop", "enough")})
    assert agreed == {agreed_at: (Trigger("stop", "enough", 0),)}


def test_a_trigger_is_local_until_agreed_and_consumed_then() -> None:
    own = Triggers(every=1)
    own.tick(1)
    own.set("mine", "first")
    own.set("mine", "second")
    assert own.pending
    assert not own.seen("mine")
    assert own.tick(2) == ()
    assert own.tick(3) == (Trigger("mine", "first", 0),)
    assert own.seen("mine")
    assert own.agreed["mine"].reason == "first"
    assert not own.pending
    assert train(own, 5, {}, start=3) == {}
    own.set("mine")
    assert train(own, 5, {}, start=8) == {10: (Trigger("mine", "", 0),)}


def test_a_resumed_run_starts_anywhere() -> None:
    assert train(Triggers(every=2), 10, {1000: ("stop", "")}, start=999) == {1004: (Trigger("stop", "", 0),)}


def test_a_count_of_steps_that_falls_back_has_boundaries() -> None:
    own = Triggers(every=2)
    train(own, 100, {})
    assert train(own, 10, {12: ("stop", "")}, start=10) == {15: (Trigger("stop", "", 0),)}


def test_several_names_at_once() -> None:
    agreed = train(Triggers(every=2), 10, {1: ("stop", "a"), 2: ("own", "b")})
    assert agreed == {5: (Trigger("stop", "a", 0), Trigger("own", "b", 0))}


def test_sync_takes_everything_and_what_it_took_does_not_come_again() -> None:
    own = Triggers(every=2)
    assert own.sync() == ()
    own.tick(1)
    own.set("early")
    own.tick(3)  # noted, an agreement is under way
    own.set("late")
    assert [trigger.name for trigger in own.sync()] == ["early", "late"]
    assert train(own, 10, {}, start=3) == {}


def test_check_asks_for_one_name_or_any_and_resets_it() -> None:
    own = Triggers(every=2)
    assert own.check() is False
    own.set("a")
    own.set("b")
    assert own.check("c") is False
    assert own.check("a") is True
    assert own.check("a") is False
    assert own.check() is True
    assert own.check() is False
    assert own.seen("a")


def test_check_leaves_the_loops_own_triggers_to_the_loop() -> None:
    own = Triggers(every=1)
    own.tick(1)
    own.set("stop")
    assert own.check() is False
    assert own.check("stop") is True
    assert own.check("stop") is True
    assert train(own, 3, {}, start=1) == {3: (Trigger("stop", "", 0),)}


def test_what_check_has_reset_is_not_agreed_again() -> None:
    own = Triggers(every=1)
    own.set("mine")
    own.tick(1)
    assert own.check("mine")
    assert train(own, 5, {}, start=1) == {}


def test_a_signal_handler_and_a_thread_can_set() -> None:
    own = Triggers(every=1)
    before = signal.signal(signal.SIGUSR1, lambda *_: own.set("preempted", "SIGUSR1"))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread = threading.Thread(target=own.set, args=("save", "from a thread"))
    thread.start()
    thread.join()
    assert set(own.sync()) == {Trigger("preempted", "SIGUSR1", 0), Trigger("save", "from a thread", 0)}


def test_after_abandon_nothing_is_agreed() -> None:
    own = Triggers(every=1)
    own.set("stop")
    own.tick(1)
    own.abandon()
    own.abandon()
    assert own.tick(2) == ()
    assert own.sync() == ()
    assert own.check() is False
    assert own.pending


def test_triggers_refuse_an_interval_of_zero() -> None:
    with pytest.raises(SettingError, match="trigger_every=0"):
        Triggers(every=0)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(triggers, "time", clock)
    return clock


def distances(own: Triggers, clock: Clock, step_s: float, steps: int, start: int = 0) -> list[int]:
    """The distance after each step whose tick was a boundary."""
    found = []
    for step in range(start + 1, start + steps + 1):
        clock.now += step_s
        boundary = step >= own._next
        own.tick(step)
        if boundary:
            found.append(own.every)
    return found


def test_the_distance_doubles_up_to_what_takes_50_ms(clock: Clock) -> None:
    own = Triggers()
    assert distances(own, clock, 0.004, 80) == [1, 1, 2, 4, 8, 13, 13, 13, 13, 13]


def test_the_distance_follows_slower_steps_and_has_bounds(clock: Clock) -> None:
    own = Triggers()
    assert max(distances(own, clock, 1e-7, 60_000)) == 10_000
    assert distances(own, clock, 1.0, 30_000, start=60_000)[-1] == 1


def test_time_between_steps_is_not_step_time(clock: Clock) -> None:
    own = Triggers()
    distances(own, clock, 0.01, 40)
    assert own.every in (5, 6)  # 0.05 / 0.01, but for rounding
    own.sync()
    clock.now += 60  # validation
    assert set(distances(own, clock, 0.01, 40, start=40)) <= {5, 6}


# Several.


def _each_rank_in_turn() -> dict[str, list[Any]]:
    state = PartialState(cpu=True, timeout=300)
    report: dict[str, list[Any]] = {"every 4 steps": [], "by time": [], "blocking": []}
    for setter in range(state.num_processes):
        mine = {6: ("stop", f"rank {setter} said so")} if state.process_index == setter else {}
        for kind, every in (("every 4 steps", EVERY), ("by time", None)):
            own = Triggers(every=every)
            agreed: dict[int, tuple[Trigger, ...]] = {}
            step = 0
            while not agreed:
                agreed = train(own, 1, mine, start=step)
                step += 1
            own.sync()
            report[kind].append((agreed, own.seen("stop")))
        own = Triggers()
        if mine:
            own.set("mine", f"rank {setter}")
        checks = [own.check("other"), own.check(), own.check()]
        if mine:
            own.set("again", f"rank {setter}")
        report["blocking"].append((checks, own.check("again"), own.check("again"), own.agreed["again"]))
    return report


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_trigger_of_any_single_rank_is_agreed_by_all_at_one_step(world: int) -> None:
    reports = run_ranks(_each_rank_in_turn, world)
    assert all(report == reports[0] for report in reports)
    for setter in range(world):
        for kind in ("every 4 steps", "by time"):
            agreed, seen = reports[0][kind][setter]
            assert list(agreed.values()) == [(Trigger("stop", f"rank {setter} said so", setter),)]
            assert seen
            if kind == "every 4 steps":
                assert list(agreed) == [13]  # as with one process
        told = Trigger("again", f"rank {setter}", setter)
        assert reports[0]["blocking"][setter] == ([False, True, False], True, False, told)


def _at_the_end() -> dict[str, Any]:
    state = PartialState(cpu=True, timeout=300)
    own = Triggers(every=2)
    if state.process_index == 1:
        own.set("early", "noted at a boundary")
    own.tick(1)
    if state.process_index == 0:
        own.set("late", "after the last boundary")
    under_way = own._outstanding is not None
    report: dict[str, Any] = {"sync": own.sync(), "left": under_way and own._outstanding, "unclaimed": own.unclaimed}
    # Nothing is left on the group: another collective meets its like, and the next loop starts anew.
    report["next"] = (gather_object(state.process_index), Triggers(every=2).sync())
    report["checked"] = (own.check("early"), own.check("early"), own.check(), own.check(), own.unclaimed)
    own.set("lost")
    report["lost"] = own.pending
    return report


@pytest.mark.dist
def test_at_the_loops_end_everything_is_agreed_and_nothing_is_under_way() -> None:
    for report in run_ranks(_at_the_end, 3):
        early, late = Trigger("early", "noted at a boundary", 1), Trigger("late", "after the last boundary", 0)
        assert report["sync"] == (late, early)
        assert report["left"] is None
        assert report["unclaimed"] == (early, late)
        assert report["next"] == ([0, 1, 2], ())
        assert report["checked"] == (True, False, True, False, ())
        assert report["lost"]


def _on_a_device() -> tuple[list[int], float]:
    state = PartialState(cpu=True, timeout=300)
    weight = torch.zeros(8, device=gpu.DEVICE)
    own = Triggers(every=3)
    gpu.begin_no_waiting()
    agreed = []
    for step in range(1, 31):
        weight += 1
        agreed += [step for _ in own.tick(step)]
        if step == 4 and state.process_index == 1:
            own.set("stop", "enough")
    own.sync()
    gpu.end_no_waiting()
    return agreed, float(weight[0])


@pytest.mark.dist
@pytest.mark.gpu
def test_no_tick_and_no_sync_waits_for_the_device() -> None:
    assert run_ranks(_on_a_device, 2) == [([10], 30.0)] * 2  # set after 4, noted at 7, agreed at 10


def _blocking_forms() -> dict[str, Any]:
    state = PartialState(cpu=True, timeout=300)
    rank, world = state.process_index, state.num_processes
    own = Triggers(every=2)
    report: dict[str, Any] = {"quiet": (own.sync(), own.check())}
    checks = []
    for setter in range(world):
        if rank == setter:
            own.set("mine", f"by {setter}")
        checks.append((own.check("other"), own.check("mine"), own.check("mine")))
    report["checks"] = checks
    own.tick(1)
    own.set(f"of {rank}")
    own.set("of all", f"said {rank}")
    own.tick(3)  # noted
    if rank == 1:
        own.set("late")
    report["sync"] = own.sync()
    report["after"] = train(own, 8, {}, start=3)
    # A name that one rank had noted is consumed by a check of all, while an agreement is under way.
    if rank == 0:
        own.set("once")
    own.tick(13)
    report["once"] = (own.check("once"), train(own, 8, {}, start=13))
    # Set on one rank after it was noted on another: one trigger, not two.
    if rank == 0:
        own.set("same")
    own.tick(31)
    if rank == 1:
        own.set("same")
    report["same"] = train(own, 20, {}, start=31)
    report["pending"] = own.pending
    return report


@pytest.mark.dist
def test_blocking_forms_over_two_ranks() -> None:
    reports = run_ranks(_blocking_forms, 2)
    assert reports[0] == reports[1]
    report = reports[0]
    assert report["quiet"] == ((), False)
    assert report["checks"] == [(False, True, False)] * 2
    assert report["sync"] == (
        Trigger("of 0", "", 0), Trigger("of all", "said 0", 0), Trigger("of 1", "", 1), Trigger("late", "", 1),
    )  # fmt: skip
    assert report["after"] == {}
    assert report["once"] == (True, {})
    assert list(report["same"].values()) == [(Trigger("same", "", 0),)]
    assert not report["pending"]


def _adaptive() -> list[int]:
    state = PartialState(cpu=True, timeout=300)
    clock = Clock()
    triggers.time = SimpleNamespace(perf_counter=clock.perf_counter)  # type: ignore[assignment]
    own = Triggers()
    found = distances(own, clock, 0.010 if state.process_index else 0.005, 80)
    own.sync()
    return found


@pytest.mark.dist
def test_ranks_of_unlike_speed_keep_one_schedule() -> None:
    first, second = run_ranks(_adaptive, 2)
    assert first == second
    assert first[:5] == [1, 1, 2, 4, 8]
    assert first[-1] == 10


def _one_rank_fails() -> str:
    state = PartialState(cpu=True, timeout=300)
    state.wait_for_everyone()
    if state.is_main_process:
        own = Triggers(every=1)
        own.set("stop")
        own.tick(1)  # the other rank never comes
        own.abandon()
        own.sync()
    state.destroy_process_group(abort=True)
    return "not held up"


@pytest.mark.dist
def test_an_abandoned_agreement_blocks_nobody() -> None:
    assert run_ranks(_one_rank_fails, 2) == ["not held up"] * 2


def _other_is_gone() -> str:
    state = PartialState(cpu=True, timeout=300)
    state.wait_for_everyone()
    if not state.is_main_process:
        state.destroy_process_group(abort=True)
        return ""
    own = Triggers(every=1)
    try:
        for step in range(1, 10):
            own.tick(step)
    except DistributedError as error:
        own.abandon()
        state.destroy_process_group(abort=True)
        return str(error)
    return "no error"


@pytest.mark.dist
def test_a_rank_that_is_gone_is_an_error_that_says_so() -> None:
    assert run_ranks(_other_is_gone, 2)[0].startswith("another process is gone")
