"""The optimizers and schedulers that `Accelerator.prepare` returns: they act at the ends of windows only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from instep.errors import UsageError
from instep.utils.optimizer_proxy import OptimizerProxy

if TYPE_CHECKING:
    from instep.accelerator.window import Window
    from instep.state.runs import GradientRecord
    from instep.strategies import Strategy


class AcceleratedOptimizer(OptimizerProxy):
    """An optimizer that steps when its accumulation window is complete.

    `step` does nothing in the other micro-batches. `zero_grad` does nothing while a window's gradients are still being
    collected, wherever it stands in the loop: before the forward or after the step.

    Args:
        optimizer: the optimizer.
        strategy: how it steps.
        gradient: where the loop stands.
        window: what the gradients of a finished window are corrected by.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, gradient: GradientRecord, window: Window) -> None:
        super().__init__(optimizer)
        self._strategy = strategy
        self.step_was_skipped = False
        """Whether the last step was left out, because the gradient scaler found one that was not finite."""
        self.steps_taken = 0
        """Calls of `step` at a window's end, those that were skipped included."""
        self._gradient = gradient
        self._window = window
        self._open = False  # holds gradients of a window that has not ended
        self._stepped = False  # they are those of the last step, which zero_grad takes away whenever it comes
        self._refused = False  # zero_grad was called meanwhile
        self._corrected = False

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Step, if the micro-batch in hand ends its window. Collective where losses came with `num_items`.

        Args:
            closure: computes the gradients and returns the loss, for optimizers that need it.
            kwargs: passed to the optimizer's step.

        Raises:
            UsageError: a closure, with windows of several micro-batches: those before the last cannot be computed anew.
        """
        if closure is not None and self._gradient.num_steps > 1:
            raise UsageError(
                f"{type(self.optimizer).__name__}.step(closure) computes its gradients anew, which cannot be done for "
                f"the earlier micro-batches of a window of {self._gradient.num_steps}. Use a larger batch and "
                "gradient_accumulation_steps=1."
            )
        if not self._gradient.sync_gradients:
            return
        self.correct_gradients()
        self._strategy.optimizer_step(self.optimizer, closure, **kwargs)
        self.step_was_skipped = self._strategy.step_was_skipped
        self.steps_taken += 1
        self._window.mark_step()
        self._open = self._corrected = False
        self._stepped = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, unless they belong to a window that has not ended."""
        if self._open and not self._stepped:
            self._refused = True
        else:
            self._zero(set_to_none)

    def _zero(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self._strategy.forget_gradients(self.optimizer)
        self._corrected = self._stepped = False

    def begin_window(self, abandoned: bool) -> None:
        """A new window begins; what an abandoned or skipped one left is dropped."""
        if self._open and (abandoned or self._refused):
            self._zero()
        self._open = self._refused = self._corrected = False

    def hold_gradients(self) -> None:
        """A backward within a window has added to the gradients."""
        self._open = True

    @property
    def begins_by_hand(self) -> bool:
        """Whether it has gradients and has never stepped: the loop is in its first window, which it counts itself."""
        return not self.steps_taken and any(
            p.grad is not None for g in self.optimizer.param_groups for p in g["params"]
        )

    def owns(self, parameters: set[int]) -> bool:
        """Whether it steps one of these parameters, given by their ids, that has a gradient."""
        return any(id(p) in parameters and p.grad is not None for g in self.optimizer.param_groups for p in g["params"])

    def correct_gradients(self) -> None:
        """At a window's end: divide by what was only known now, once. Before clipping, and before the step."""
        if self._corrected:
            return
        self._corrected = True
        factor = self._window.correction()
        if factor is None:
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor)


class AcceleratedScheduler:
    """A learning-rate scheduler that steps once per optimizer step, on whatever number of processes.

    Everything else is forwarded to the scheduler.

    Args:
        scheduler: the scheduler.
        optimizers: the prepared optimizers, those to come too; where its own has skipped its step it does not step.
        gradient: where the loop stands.
        window: how many batches the last step took.
        step_with_optimizer: False leaves every call of `step` to the user.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[AcceleratedOptimizer],
        gradient: GradientRecord,
        window: Window,
        step_with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.step_with_optimizer = step_with_optimizer
        self._optimizers = optimizers
        self._gradient = gradient
        self._window = window

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the optimizer has; with `adjust_scheduler` by as many batches as the window had."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradient.sync_gradients or any(optimizer.step_was_skipped for optimizer in self._owners()):
            return
        for _ in range(self._window.length if self._gradient.adjust_scheduler else 1):
            self.scheduler.step(*args, **kwargs)

    def places(self, optimizers: Sequence[Optimizer | None]) -> list[int]:
        """Which of these optimizers it steps with."""
        mine = [prepared.optimizer for prepared in self._owners()]
        return [index for index, other in enumerate(optimizers) if any(other is optimizer for optimizer in mine)]

    def _owners(self) -> list[AcceleratedOptimizer]:
        owner = getattr(self.scheduler.optimizer, "optimizer", self.scheduler.optimizer)  # it may know the prepared one
        return [prepared for prepared in self._optimizers if prepared.optimizer is owner] or self._optimizers

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: while being copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"
