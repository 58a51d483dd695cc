from __future__ import annotations

import pytest

from instep.errors import SettingError, StateError
from instep.state import AcceleratorState, GradientState, PartialState, Run, pop_run, push_run

GRADIENT_NAMES = (
    "sync_gradients",
    "num_steps",
    "end_of_dataloader",
    "remainder",
    "active_dataloader",
    "dataloader_references",
    "adjust_scheduler",
    "sync_with_dataloader",
    "is_xla_gradients_synced",
)


def test_outside_a_run_every_backward_is_its_own_window() -> None:
    state = GradientState()
    assert not state.initialized
    assert [getattr(state, name) for name in GRADIENT_NAMES] == [True, 1, False, -1, None, [], False, True, False]
    assert not state.in_dataloader


def test_what_the_loop_writes_is_what_everybody_reads() -> None:
    view = GradientState()
    run = push_run(Run("Trainer.fit", num_steps=4))
    assert view.initialized
    assert view.num_steps == 4
    loader = object()
    run.gradient.sync_gradients = False
    run.gradient.active_dataloader = loader
    run.gradient.dataloader_references = [loader]
    assert (view.sync_gradients, view.active_dataloader, view.in_dataloader) == (False, loader, True)
    view.dataloader_references.clear()
    assert GradientState().dataloader_references == [loader]
    inner = push_run(Run("Trainer.validate"))
    assert view.sync_gradients
    pop_run(inner)
    assert not view.sync_gradients


@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_gradient_state_cannot_be_assigned(name: str) -> None:
    with pytest.raises(AttributeError, match=f"GradientState.{name} cannot be assigned: the loop of a Trainer"):
        setattr(GradientState(), name, 1)
    push_run(Run("Trainer.fit"))
    with pytest.raises(AttributeError, match=r"the loop of Trainer\.fit writes it"):
        setattr(GradientState(), name, 1)


def test_precision_and_plugin_are_the_active_runs() -> None:
    state = AcceleratorState(cpu=True)
    assert not state.initialized
    for name in ("mixed_precision", "plugin"):
        with pytest.raises(StateError, match="there is no active run"):
            getattr(state, name)
    plugin = object()
    fit = push_run(Run("Trainer.fit", "bf16", plugin))
    assert state.initialized
    assert (state.mixed_precision, state.plugin) == ("bf16", plugin)
    test = push_run(Run("Trainer.test", "no"))
    assert state.mixed_precision == "no"
    pop_run(test)
    assert AcceleratorState().mixed_precision == "bf16"
    pop_run(fit)
    assert not state.initialized


def test_a_conflict_within_a_run_names_both_values() -> None:
    push_run(Run("Trainer.fit", "bf16"))
    assert AcceleratorState("bf16", cpu=True).mixed_precision == "bf16"
    with pytest.raises(StateError, match=r"mixed_precision='fp16'.*Trainer\.fit.*mixed_precision='bf16'"):
        AcceleratorState("fp16")
    with pytest.raises(SettingError, match="mixed_precision='half'"):
        AcceleratorState("half")


def test_accelerator_state_has_all_of_the_process_and_cannot_be_assigned() -> None:
    state, process = AcceleratorState(cpu=True), PartialState()
    assert (state.device, state.num_processes, state.is_main_process) == (process.device, 1, True)
    for name in ("mixed_precision", "device", "anything"):
        with pytest.raises(AttributeError, match="cannot be assigned"):
            setattr(state, name, "fp16")
