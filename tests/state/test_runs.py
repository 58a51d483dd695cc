from __future__ import annotations

import pytest

from instep.errors import SettingError
from instep.state import GradientState, PartialState, Run, active_run, pop_run, push_run


def test_the_run_on_top_is_active() -> None:
    outer = push_run(Run("Trainer.fit", "bf16", num_steps=4))
    inner = push_run(Run("Trainer.validate"))
    assert active_run() is inner
    pop_run(inner)
    assert active_run() is outer
    pop_run(outer)
    assert active_run() is None


def test_a_run_below_can_end_first_and_ending_twice_is_fine() -> None:
    held, running = push_run(Run("Accelerator")), push_run(Run("Trainer.fit"))
    pop_run(held)
    pop_run(held)
    assert active_run() is running
    pop_run(running)
    assert active_run() is None


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(SettingError, match=r"mixed_precision='bf61'.*Did you mean 'bf16'"):
        Run("x", "bf61")
    with pytest.raises(SettingError, match="num_steps=0"):
        Run("x", num_steps=0)


def test_reset_ends_all_runs() -> None:
    push_run(Run("x", num_steps=3))
    PartialState._reset_state()
    assert active_run() is None
    assert GradientState().num_steps == 1


def test_a_record_takes_only_what_it_knows() -> None:
    record = Run("x").gradient
    with pytest.raises(AttributeError):
        record.sync_gradient = True  # type: ignore[attr-defined]
