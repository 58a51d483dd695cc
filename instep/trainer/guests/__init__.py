"""Guests of the training step: features, such as the check for nan, that change the step of a run.

The step is built at the start of each epoch, and again when the batch size grows. It is built from parts (`StepParts`).
While it is built, three methods of the guests are called, in which a guest may replace parts by its own functions:
first `take` of all guests, then `forward_backward` of all guests, then `finish` of all guests. Each guest gets the
parts as the guests before it have left them. A run without guests has no extra cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from instep.data import BatchSource
from instep.trainer.hooks import Hook

if TYPE_CHECKING:
    from instep.trainer.context import RunContext

Step = Callable[..., Any]


@dataclass
class StepParts:
    """Parts of the training step of an epoch, in the order in which they are made.

    Attributes:
        take: `take(batch, batch_idx)` runs `training_step`, and returns what it returned.
        zero_grad: zeroes the gradients at the start of an accumulation window.
        weigh: `weigh(batch_idx)` returns the weight of a micro-batch's loss in its window.
        full_batches: number of batches at the beginning of the epoch that have the weight `weight_of_full`; `weigh` is
            not called for these.
        weight_of_full: 1 / accumulate_grad_batches.
        on_loss: called with each loss before its backward, but not with the loss of a replayed batch.
        before_clip: called with the optimizers at the end of a window, before the gradients are clipped.
        needs_loss: whether the optimizers step only at the end of a window that had a loss.
        around: reasons why forward and backward cannot be compiled or recorded as one function; empty if there are
            none.
        forward_backward: `forward_backward(batch, batch_idx)` runs forward and backward of a micro-batch; returns the
            same as `take`.
        step_plain: steps the only optimizer; None if there are several, or if something wraps the optimizer's step.
        step: `step(batch, batch_idx)` runs the whole step.
    """

    take: Step
    zero_grad: Callable[[], Any]
    weigh: Callable[[int], float]
    full_batches: int
    weight_of_full: float
    on_loss: list[Callable[[Tensor], Any]] = field(default_factory=list)
    before_clip: list[Callable[[Sequence[Optimizer]], Any]] = field(default_factory=list)
    needs_loss: bool = False
    around: list[str] = field(default_factory=list)
    forward_backward: Step = field(init=False)
    step_plain: Callable[[], Any] | None = None
    step: Step = field(init=False)


class StepGuest:
    """Base class of a feature that changes the training step. A method that is not overridden changes nothing.

    Args:
        ctx: context of the run, or of a trial (steps that are undone afterwards), which has its own guests.

    Attributes:
        in_trials: whether the guest also changes steps that are only tried and then undone.
        ended: whether the last step found no batch left, and did nothing.
    """

    in_trials = True
    ended = False

    def __init__(self, ctx: RunContext) -> None:
        self.ctx = ctx

    # ---- batches, in training and in evaluation

    def batches(self, name: str, batches: Iterator[Any], source: BatchSource, **place: Any) -> Iterator[Any]:
        """Return the batches for the step method `name`.

        `place` holds details of the loop that reads the batches, such as its log and the loader's index.
        """
        return batches

    def step_method(self, name: str, step: Step) -> Step:
        """Return the step method `name` or a wrapper of it.

        The returned function takes (batch, batch_idx), and in evaluation also a dataloader_idx.
        """
        return step

    def hooks_after(self, name: str, hooks: tuple[Hook, ...]) -> tuple[Hook, ...]:
        """Return the hooks to call after a batch of the step method `name`."""
        return hooks

    # ---- the training step

    def check(self) -> None:
        """Raise an error if the feature does not work with the settings or loaders. Called before training."""

    def take(self, parts: StepParts) -> None:
        """Change parts such as `parts.take` and `parts.weigh`, from which `parts.forward_backward` is made later."""

    def forward_backward(self, parts: StepParts) -> None:
        """Change `parts.forward_backward` and `parts.step_plain`."""

    def finish(self, parts: StepParts) -> None:
        """Wrap or replace `parts.step`, the whole training step."""

    def step_optimizer(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that steps an optimizer: `step(optimizer, closure=None)`."""
        return step

    def settle(self) -> None:
        """Finish work that was put off, such as reading flags on the device.

        Called when logged values are handed over, and before a save, a validation and the end of an epoch. Collective.
        """


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def arguments_of(module: Any, name: str) -> Mapping[str, Any]:
    """Return the parameters of a step method by name; an empty mapping if the module has no such method."""
    step = getattr(module, name, None)
    return signature(step).parameters if callable(step) else {}


GUESTS: dict[str, Callable[[RunContext], bool]] = {
    "own_batches:OwnBatches": lambda ctx: any("dataloader_iter" in arguments_of(ctx.module, name) for name in _STEPS),
    "nonfinite:NonFiniteGuard": lambda ctx: ctx.settings.nonfinite is not None and bool(ctx.optimizers),
    "one_graph:OneGraph": lambda ctx: ctx.settings.cuda_graphs or getattr(ctx.settings.compile, "scope", "") == "step",
    "garbage:GarbageCollection": lambda ctx: ctx.settings.gc_every_n_steps is not None,
}
"""Features that change a run's steps: file and class -> whether a run uses it; in the order of their calls."""


def find_guests(ctx: RunContext, tried: bool = False) -> list[StepGuest]:
    """Create the guests of a run: the features that change its steps.

    Args:
        ctx: the run.
        tried: whether the steps are only tried and then undone; guests with `in_trials = False` are left out then.
    """
    kinds = [resolve_name(f"{__name__}.{path}") for path, wanted in GUESTS.items() if wanted(ctx)]
    return [kind(ctx) for kind in kinds if kind.in_trials or not tried]


def note_samples(ctx: RunContext) -> None:
    """Write the position at an epoch's start into the run folder, so that the samples of a step can be listed later."""
    folder, at, loaders = ctx.trainer.run_folder.path, ctx.position, ctx.loaders
    if ctx.rank == 0 and folder is not None and not ctx.is_trial:
        accumulate = loaders.accumulate if ctx.module.automatic_optimization and not loaders.phases else None
        resolve_name("instep.streams.ledger:note")(folder, ctx.source, at.epoch, at.batch, at.global_step, accumulate)


REPLAY = "INSTEP_REPLAY"
"""Environment variable that `instep replay` sets (to a JSON object) when it runs a program again."""


def find_replay() -> Any:
    """Return the module that turns a run into a replay, if `instep replay` runs this program; else None."""
    return import_module(f"{__name__}.replay") if REPLAY in os.environ else None
