"""The active run: what the states say inside Trainers that follow, or stand inside, each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.errors import StateError
from instep.state import AcceleratorState, GradientState, Run, active_run, pop_run, push_run
from tests.trainer.toys import Toy, loader, quiet


def seen_now() -> tuple[str, int]:
    """Precision and accumulation, as everybody can read them."""
    return AcceleratorState().mixed_precision, GradientState().num_steps


class Watcher(Toy):
    """Writes down what the states say in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[tuple[tuple[str, int], bool, bool]] = []
        self.validated: list[tuple[tuple[str, int], bool]] = []
        self.tested: list[tuple[str, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gradients = GradientState()
        self.trained.append((seen_now(), gradients.sync_gradients, gradients.end_of_dataloader))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.validated.append((seen_now(), GradientState().sync_gradients))
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.tested.append(seen_now())
        return super().test_step(batch, batch_idx)


def test_two_trainers_of_other_precision_and_accumulation_in_turn() -> None:
    one = quiet(max_epochs=1, precision="bf16-mixed", accumulate_grad_batches=4)
    other = quiet(max_epochs=1, accumulate_grad_batches=2)
    first, second, third = Watcher(), Watcher(), Watcher()
    one.fit(first, loader())
    assert active_run() is None
    other.fit(second, loader())
    quiet(max_epochs=1, precision="bf16-mixed", accumulate_grad_batches=4).fit(third, loader())
    one.test(first, loader())
    other.test(first, loader())
    assert [step[0] for step in first.trained] == [("bf16", 4)] * 4
    assert [step[0] for step in second.trained] == [("no", 2)] * 4
    assert [sync for _, sync, _ in second.trained] == [False, True, False, True]
    assert {sees for sees, *_ in third.trained} == {("bf16", 4)}
    assert [precision for precision, _ in first.tested] == ["bf16"] * 4 + ["no"] * 4
    assert active_run() is None


def test_a_trainer_inside_a_fit_gives_back_what_it_found() -> None:
    class Outer(Watcher):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                inside = Watcher()
                quiet(precision="bf16-mixed").test(inside, loader(3))
                self.inside = inside.tested
            self.after = (seen_now(), GradientState().sync_gradients)

    outer = Outer()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(outer, loader(9))
    assert outer.inside == [("bf16", 1)]
    assert [(sees, sync) for sees, sync, _ in outer.trained] == [
        (("no", 2), False), (("no", 2), True), (("no", 2), True),
    ]  # fmt: skip
    assert outer.after == (("no", 2), True)


def test_validation_inside_fit_does_not_shift_the_window() -> None:
    module = Watcher()
    quiet(max_epochs=1, accumulate_grad_batches=3, val_check_interval=2, num_sanity_val_steps=0).fit(
        module, loader(18), loader(6)
    )
    assert [sync for _, sync, _ in module.trained] == [False, False, True, False, False, True]
    assert [end for *_, end in module.trained] == [False] * 5 + [True]
    assert {sees[0] for sees, _ in module.validated} == {"no"}
    assert len(module.validated) == 4  # what is due after two batches waits for the end of the window


def test_a_run_that_fails_is_over() -> None:
    class Broken(Watcher):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        quiet(max_epochs=1, precision="bf16-mixed").fit(Broken(), loader())
    assert active_run() is None
    assert not AcceleratorState().initialized
    assert GradientState().num_steps == 1


@pytest.mark.parametrize(("name", "found"), [("deepspeed", True), ("ddp", False)])
def test_the_deepspeed_plugin_is_the_strategy_that_is_deepspeeds(name: str, found: bool) -> None:
    plugin = SimpleNamespace(name=name)
    run = push_run(Run("a test", plugin=plugin))
    try:
        assert (AcceleratorState().deepspeed_plugin is plugin) == found
    finally:
        pop_run(run)


def test_a_conflict_is_an_error_within_a_run_only() -> None:
    class Asking(Watcher):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert AcceleratorState("bf16").device == torch.device("cpu")
            with pytest.raises(StateError, match=r"'fp16'.*Trainer\.fit.*'bf16'"):
                AcceleratorState("fp16")
            return super().training_step(batch, batch_idx)

    quiet(max_epochs=1, precision="bf16-mixed").fit(Asking(), loader(3))
    quiet(max_epochs=1).fit(Watcher(), loader(3))
