from __future__ import annotations

import copy
import json
from datetime import timedelta

import pytest

from instep.callbacks import Callback, Timer
from instep.callbacks import timer as module
from instep.errors import SettingError
from instep.trainer.hooks import is_overridden
from tests.callbacks.fakes import FakeTrainer
from tests.trainer.toys import Toy, loader, quiet


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


def step(timer: Timer, trainer: FakeTrainer) -> int:
    timer.on_train_batch_end(trainer, None, None, None, 0)
    return len(trainer.triggers)


def test_stops_by_trigger_when_the_time_is_up(clock):
    timer, trainer = Timer(duration="00:00:00:10"), FakeTrainer()
    timer.on_train_start(trainer, None)
    clock.now += 9.9
    assert step(timer, trainer) == 0
    assert timer.time_remaining() == pytest.approx(0.1)
    clock.now += 0.1
    assert step(timer, trainer) == 1
    assert trainer.triggers == [("stop", "Timer: 10 s are over")]
    clock.now += 0.5
    assert step(timer, trainer) == 1  # asked again, but not at every step
    clock.now += 0.6
    assert step(timer, trainer) == 2
    assert len(trainer.printed) == 1
    timer.on_train_end(trainer, None)
    clock.now += 100
    assert timer.time_elapsed() == pytest.approx(11.1)
    assert timer.end_time() - timer.start_time() == pytest.approx(11.1)


def test_other_ranks_never_decide(clock):
    timer, trainer = Timer(duration={"seconds": 1}), FakeTrainer(global_rank=1, world_size=2)
    timer.on_train_start(trainer, None)
    clock.now += 100
    assert step(timer, trainer) == 0
    timer.on_train_epoch_end(trainer, None)
    assert trainer.triggers == []


def test_a_timer_with_an_epoch_interval_stops_at_the_epochs_end(clock):
    timer, trainer = Timer(duration={"seconds": 1}, interval="epoch", verbose=False), FakeTrainer()
    timer.on_train_start(trainer, None)
    clock.now += 2
    assert step(timer, trainer) == 0
    timer.on_train_epoch_end(trainer, None)
    assert len(trainer.triggers) == 1
    assert trainer.printed == []


def test_a_hook_at_every_step_only_where_it_is_used(clock):
    assert is_overridden(Timer(interval="step"), "on_train_batch_end", Callback)
    assert not is_overridden(Timer(interval="epoch"), "on_train_batch_end", Callback)
    seen = []

    class Mine(Timer):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            seen.append(batch_idx)

    timer, trainer = copy.deepcopy(Mine(duration={"seconds": 1})), FakeTrainer()
    timer.on_train_start(trainer, None)
    clock.now += 2
    assert step(timer, trainer) == 1
    assert seen == [0]


def test_a_resumed_timer_counts_the_seconds_of_earlier_runs(clock):
    timer, trainer = Timer(duration={"seconds": 10}), FakeTrainer()
    timer.on_train_start(trainer, None)
    clock.now += 7
    state = json.loads(json.dumps(timer.state_dict()))
    resumed = Timer(duration={"seconds": 10})
    resumed.load_state_dict(state)
    clock.now += 1000
    resumed.on_train_start(trainer, None)
    assert resumed.time_elapsed() == 7
    resumed.on_train_end(trainer, None)
    resumed.load_state_dict(state)
    assert resumed.time_elapsed() == 7
    resumed.on_train_start(trainer, None)
    clock.now += 3
    assert step(resumed, trainer) == 1


def test_stages_are_measured_and_a_second_fit_adds(clock):
    timer, trainer = Timer(), FakeTrainer()
    for _ in range(2):
        timer.on_train_start(trainer, None)
        timer.on_validation_start(trainer, None)
        clock.now += 2
        timer.on_validation_end(trainer, None)
        clock.now += 3
        timer.on_train_end(trainer, None)
        clock.now += 50
    assert timer.time_elapsed("validate") == 4
    assert timer.time_elapsed("train") == 10
    assert timer.time_elapsed("test") == 0
    assert timer.time_remaining() is None
    assert timer.start_time("test") is None


@pytest.mark.parametrize("duration", [0, timedelta(0), "00:00:00:00", {"seconds": 0}])
def test_no_time_at_all_is_no_step(duration, tmp_path):
    trainer = quiet(max_epochs=1, callbacks=[Timer(duration)], default_root_dir=tmp_path)
    trainer.fit(Toy(), loader())
    assert trainer.global_step == 0


def test_wrong_options_of_the_timer_are_named():
    with pytest.raises(SettingError, match="zero or a time above it"):
        Timer(timedelta(-1))
    with pytest.raises(SettingError, match="interval"):
        Timer(interval="batch")
    with pytest.raises(SettingError, match="stage"):
        Timer().time_elapsed("fit")
