"""Accumulation windows, and the prepared optimizers and schedulers, which step only at the end of a window.

`Window` computes the loop's place in an accumulation window, and the weight of each loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from instep.data.plan import gradient_correction, rank_weight, window_scale
from instep.distributed import all_reduce_
from instep.errors import UsageError
from instep.state import Run
from instep.state.device import widest_float
from instep.strategies.gradients import parameters_of
from instep.utils.optimizers import OptimizerProxy
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.accelerator.loader import AcceleratedLoader
    from instep.state.runs import GradientRecord
    from instep.strategies import Strategy


class Window:
    """The current accumulation window of an Accelerator: the micro-batches of one optimizer step.

    A window belongs to the loader that is trained on: its place in the epoch follows from the number of the batch, not
    from a count of calls. So an evaluation loop that is left early changes nothing, a second `accumulate` for the same
    batch (the two halves of a GAN) stays in its micro-batch, and a resumed epoch has the same windows.

    Args:
        run: the run whose gradient record is written.
        num_processes: number of processes over which gradients are averaged.
        device: device on which counts of items are summed.
    """

    def __init__(self, run: Run, num_processes: int, device: torch.device) -> None:
        self._gradient = run.gradient
        self._num_processes = num_processes
        self._device = device
        self._dtype = widest_float(device)
        self.loader: AcceleratedLoader | None = None
        """Loader of the batch that was trained on last; None if the loop uses no prepared loader."""
        self.length = run.gradient.num_steps
        """Number of micro-batches in the open accumulation window so far, or in the window that ended last."""
        self.begin = 0
        """Index in the epoch of the first batch of this accumulation window."""
        # id of a running loader -> its (epoch, batch) when the accumulation window last checked it
        self._places: dict[int, tuple[int, int]] = {}
        # the loader that the last optimizer step trained on, and the (epoch, batch) of all running loaders at this step
        self._stepped: tuple[AcceleratedLoader | None, dict[int, tuple[int, int]]] = None, {}
        self._calls = 0  # micro-batches so far, for accumulation windows that do not end with a loader's epoch
        self._entered = False
        self._inside = 0  # number of open `accumulate` blocks
        self._items: Tensor | float | None = None
        self._items_of_batch: Tensor | float | None = None
        self._plain = self._warned = False
        self.joins = False
        """Whether a `join_uneven_inputs` block is open, in which ranks whose data has ended wait for the others."""
        # new length of accumulation windows, which is not in use yet; None if the length does not change
        self._next: int | None = None
        self._factor: Tensor | float | None = None

    def set_length(self, num_steps: int) -> None:
        """Change the number of micro-batches of each accumulation window.

        The call returns at once. While a loader runs, the new length is used from the next batch at which a window
        begins with the old length and also with the new one.
        """
        self._next = num_steps
        if not self.running and self._gradient.sync_gradients:
            self._change(None)

    def _change(self, loader: AcceleratedLoader | None) -> None:
        """Start to use the new length of accumulation windows, if windows of both lengths begin at this batch.

        The windows of a loader begin at batch indices that are multiples of their length.
        """
        at = 0 if loader is None or not self._gradient.sync_with_dataloader else loader.batch_idx
        if self._next is None or at % lcm(self._next, self._gradient.num_steps):
            return
        self._gradient.num_steps, self._next, self._calls = self._next, None, 0
        if loader is not None:
            loader.set_windows(self._gradient.num_steps)

    def enter(self, optimizers: Sequence[AcceleratedOptimizer]) -> bool:
        """Count the current micro-batch; return True if it ends its accumulation window."""
        gradient = self._gradient
        moved = self._look()
        loader = self.loader
        self._inside += 1
        counted = self._inside > 1 if loader is None else not moved
        if counted and self._entered:
            return gradient.sync_gradients
        if self._next is not None and gradient.sync_gradients:
            self._change(loader)
        num_steps = gradient.num_steps
        if loader is None or not gradient.sync_with_dataloader:
            place = self._calls % num_steps + 1
            self._calls += 1
            first, ends = place == 1, place == num_steps
        else:
            place = loader.batch_idx % num_steps + 1
            first = place == 1 or loader.batch_idx == loader.source.first_batch
            ends = place == num_steps or loader.is_last
        if first or not self._entered:
            abandoned = self._entered and not gradient.sync_gradients
            self._items = self._factor = None
            self._plain = False
            for optimizer in optimizers:
                optimizer.begin_window(abandoned)
        self._items_of_batch = None
        self._entered = True
        self.length, self.begin = place, 0
        if loader is not None:
            self.begin = max(loader.batch_idx + 1 - place, loader.source.first_batch)
        if loader is not None and gradient.sync_with_dataloader:
            self.length = loader.batch_idx + 1 - self.begin
        gradient.sync_gradients = ends
        return ends

    @property
    def running(self) -> list[AcceleratedLoader]:
        """Loaders that yield batches now, outermost first."""
        return self._gradient.dataloader_references

    def restart(self) -> None:
        """Forget the open accumulation window, so that the next micro-batch begins a new one."""
        self._calls, self._entered, self._gradient.sync_gradients = 0, False, True

    def leave(self) -> None:
        """Leave a block of the current micro-batch."""
        self._inside -= 1

    def _look(self) -> bool:
        """Find the running loader that is trained on. Return True if a running loader has a new batch.

        The loader that is trained on stays the same if it has a new batch, or if no running loader has one. Otherwise
        it is the outermost loader with a new batch. So a batch of other data that is read inside the loop does not
        begin an accumulation window.
        """
        if not self.running:
            self.loader = None
            return True
        self.loader, self._places, moved = self._find(self.loader, self._places)
        return moved

    def _find(
        self, known: AcceleratedLoader | None, places: dict[int, tuple[int, int]]
    ) -> tuple[AcceleratedLoader, dict[int, tuple[int, int]], bool]:
        running = self.running
        moved = [loader for loader in running if places.get(id(loader)) != loader.place]
        found = known
        if moved and not any(loader is known for loader in moved):
            found = moved[0]
        elif not moved and not any(loader is known for loader in running):
            found = running[-1]
        assert found is not None
        return found, {id(loader): loader.place for loader in running}, bool(moved)

    def mark_step(self) -> None:
        """Record an optimizer step: the current batch is done, even if `backward` was not called for it."""
        loader = self.loader
        if loader is not None and loader.batches_done == loader.batch_idx + 1:
            return
        if self.running:
            loader, places, _ = self._find(*self._stepped)
            self._stepped = loader, places
            self._mark_done(loader)
            for each in self.running:
                if each.opening is not None:
                    each.opening.use()

    def _mark_done(self, loader: AcceleratedLoader) -> None:
        """Record that the current batches of the loader, and of loaders that are zipped with it, are done."""
        loader.batches_done = loader.batch_idx + 1
        for other in self.running:
            if other.batch_idx >= other.source.first_batch:
                other.batches_done = other.batch_idx + 1

    def weight(self) -> float:
        """Return the factor for a batch's mean loss that makes the window's gradient a mean over all ranks' samples."""
        if not self._inside:
            self._look()
            if self._next is not None:
                self._change(self.loader)
        loader, num_steps = self.loader, self._gradient.num_steps
        if loader is None:
            return 1.0 / num_steps
        index = loader.batch_idx
        self._mark_done(loader)
        if index < loader.full_batches or (num_steps > 1 and not self._inside):
            return 1.0 / num_steps  # outside of `accumulate` the length of the user's window is unknown
        if not self._gradient.sync_with_dataloader:  # each batch is weighed as in a full accumulation window
            return rank_weight(loader.source) / num_steps
        return window_scale(loader.source, index, num_steps)

    def weigh_items(self, num_items: Tensor | float) -> Tensor | float:
        """Return the factor for a loss that is a mean over `num_items`.

        The gradients are divided later by the total number of items in the accumulation window.
        """
        if not self._inside:
            raise UsageError(
                "backward(num_items=...) weighs the losses of a window by their items: say where its micro-batches "
                "begin and end by `with accelerator.accumulate(model):` around forward, backward and step."
            )
        if self._plain:
            raise _mixed()
        if self.joins:
            raise UsageError(
                "backward(num_items=...) adds up the items of all ranks, and under join_uneven_inputs a rank without "
                "data adds none: the others would wait for it. Leave num_items out, or set even_batches=True, where "
                "such a rank repeats a batch with the weight 0."
            )
        loader = self.loader
        # a rank that only repeats a batch adds no items
        replays = loader is not None and loader.source.share.mine == 0
        if self._items_of_batch is None:
            count = num_items.detach().to(self._device, self._dtype) if isinstance(num_items, Tensor) else num_items
            count = 0.0 if replays else count
            self._items = count if self._items is None else self._items + count
            self._items_of_batch = num_items
        elif self._items_of_batch is not num_items and self._items_of_batch != num_items:
            raise UsageError(
                "backward(num_items=...) got two different numbers for one micro-batch. Give the same number with "
                "each of its losses."
            )
        if loader is not None:
            self._mark_done(loader)
        return 0.0 if replays else num_items

    def weigh_plainly(self) -> float:
        """Return the factor for a loss that `backward` got without `num_items`."""
        if not self._inside:
            self._items = None  # items are counted only inside `accumulate`, so this count is left from an earlier loop
        elif self._items is not None:
            raise _mixed()
        if not self._inside and self._gradient.num_steps > 1 and not self._warned:
            self._warned = True
            warn_user(
                "accelerator.backward() outside of `with accelerator.accumulate(model):` divides each loss by "
                f"gradient_accumulation_steps={self._gradient.num_steps}, in a shorter last window too, whose "
                "gradients are too small then. Put forward, backward and step into accelerator.accumulate(model); "
                "losses over tokens are given as backward(loss, num_items=tokens)."
            )
        self._plain = True
        return self.weight()

    @property
    def corrects(self) -> bool:
        """Whether the gradients of the accumulation window must be corrected before they are read."""
        unreliable = self.loader is not None and not self.loader.reliable and self._gradient.sync_with_dataloader
        return self._entered and (self._items is not None or unreliable)

    def correction(self) -> Tensor | float | None:
        """Return the factor for the gradients of a finished accumulation window; None for no correction.

        Collective if items are counted.
        """
        if not self.corrects:
            return None
        if self._factor is None:
            self._factor = self._compute()
        return self._factor

    def _compute(self) -> Tensor | float:
        if self._items is not None:
            total = torch.as_tensor(self._items, dtype=self._dtype, device=self._device).clone()
            return self._num_processes / all_reduce_(total).clamp_(min=1.0)
        assert self.loader is not None
        return gradient_correction(self.loader.source, self.loader.batch_idx, self._gradient.num_steps)


def _mixed() -> UsageError:
    return UsageError(
        "backward() was called with num_items for some losses of a window and without for others, so their weights "
        "cannot be compared. Give num_items with every loss, or with none."
    )


class AcceleratedOptimizer(OptimizerProxy):
    """An optimizer that steps when its accumulation window is complete.

    `step` does nothing in the other micro-batches. `zero_grad` does nothing while the gradients of a window are still
    being accumulated, whether the loop calls it before the forward or after the step.

    Args:
        optimizer: the optimizer.
        strategy: strategy that steps the optimizer.
        gradient: gradient state, which says whether the window ends.
        window: accumulation window, which corrects the gradients at its end.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, gradient: GradientRecord, window: Window) -> None:
        super().__init__(optimizer)
        self._strategy = strategy
        self.step_was_skipped = False
        """Whether the last step was left out because the gradient scaler found a gradient that was not finite."""
        self.steps_taken = 0
        """Number of calls of `step` at the end of an accumulation window, including the steps that were skipped."""
        self._gradient = gradient
        self._window = window
        self._open = False  # whether the optimizer holds gradients of an unfinished accumulation window
        # whether the optimizer has stepped with the gradients that it holds; zero_grad may then drop them
        self._stepped = False
        self._refused = False  # whether zero_grad was called while the accumulation window was open
        self._corrected = False

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise UsageError, since an optimizer was called in the place of a model."""
        raise UsageError(
            f"{type(self.optimizer).__name__} was called as a model is. prepare() returns what it is given in the same "
            "order: model, optimizer, loader = accelerator.prepare(model, optimizer, loader)."
        )

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> None:
        """Step, if the current micro-batch ends its accumulation window. Collective if losses came with `num_items`.

        Args:
            closure: function that computes the gradients and returns the loss, for optimizers that need it.
            kwargs: passed to the optimizer's step.

        Raises:
            UsageError: a closure is given, and accumulation windows have several micro-batches; a closure cannot
                compute the gradients of the earlier micro-batches again.
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
        self._strategy.gradients.step(self.optimizer, closure, **kwargs)
        self.step_was_skipped = self._strategy.gradients.step_was_skipped
        self.steps_taken += 1
        self._window.mark_step()
        self._open = self._corrected = False
        self._stepped = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, unless they belong to an unfinished accumulation window."""
        if self._open and not self._stepped:
            self._refused = True
        else:
            self._zero(set_to_none)

    def _zero(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        self._strategy.gradients.forget(self.optimizer)
        self._corrected = self._stepped = False

    def begin_window(self, abandoned: bool) -> None:
        """Begin a new window; drop gradients that are left from an abandoned window or a `zero_grad` without effect."""
        if self._open and (abandoned or self._refused):
            self._zero()
        self._open = self._refused = self._corrected = False

    def restore(self, steps_taken: int) -> None:
        """Set the number of steps to that of a checkpoint, and drop all gradients, since a checkpoint has none."""
        self._zero()
        self._open, self._refused, self.steps_taken = False, False, steps_taken

    def hold_gradients(self) -> None:
        """Record that a backward within an accumulation window has added to the gradients."""
        self._open = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle only the optimizer, since accumulation windows and strategy belong to this run."""
        return _itself, (self.optimizer,)

    @property
    def begins_by_hand(self) -> bool:
        """Whether the optimizer has gradients but never stepped.

        If so, the loop counts micro-batches itself, and is in its first window.
        """
        return not self.steps_taken and any(p.grad is not None for p in parameters_of(self.optimizer))

    def owns(self, parameters: set[int]) -> bool:
        """Return True if the optimizer steps one of these parameters (by id) and the parameter has a gradient."""
        return any(id(p) in parameters and p.grad is not None for p in parameters_of(self.optimizer))

    def correct_gradients(self) -> None:
        """Multiply the gradients, once per accumulation window, by a factor that is known only at the window's end.

        This must be called before the gradients are clipped and the optimizer steps.
        """
        if self._corrected:
            return
        self._corrected = True
        factor = self._window.correction()
        if factor is not None:
            self._strategy.gradients.multiply(self.optimizer, factor)


def _itself(optimizer: Optimizer) -> Optimizer:
    return optimizer


class AcceleratedScheduler:
    """Learning-rate scheduler that steps once per optimizer step, with any number of processes.

    All other attributes are those of the original scheduler.

    Args:
        scheduler: the scheduler.
        optimizers: list of the prepared optimizers, which may grow later. The scheduler does not step if its own
            optimizer has skipped a step.
        gradient: gradient state, which says whether the window ends.
        window: accumulation window, which knows how many batches the last step took.
        step_with_optimizer: whether the scheduler steps only with its optimizer. If False, every call of `step` steps.
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
        self.repeats = 1
        """Number of scheduler steps per optimizer step; above 1 if the schedule counts the steps of all processes."""
        self._ends = 0  # number of calls of `step` after the last learning rate was reached

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the optimizer has stepped.

        With `adjust_scheduler`, step once for each batch of the accumulation window.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._gradient.sync_gradients or any(optimizer.step_was_skipped for optimizer in self._owners()):
            return
        for _ in range(self.repeats * (self._window.length if self._gradient.adjust_scheduler else 1)):
            if self._ended():
                return
            self.scheduler.step(*args, **kwargs)

    def _ended(self) -> bool:
        """Return True if a OneCycleLR has reached its last rate, which then stays. Warn once if the loop goes on.

        torch itself would take one step more, to a rate that rises again or is below 0, and would then raise an error.
        """
        if not isinstance(self.scheduler, OneCycleLR) or self.scheduler.last_epoch < self.scheduler.total_steps - 1:
            return False
        self._ends += 1
        if self._ends == 2:  # the first call follows the last step of the cycle, and needs no warning
            warn_user(
                f"OneCycleLR has taken its {self.scheduler.total_steps} steps; the learning rate stays as it is. It "
                "steps once per optimizer step, on any number of processes"
            )
        return True

    def places(self, optimizers: Sequence[Optimizer | None]) -> list[int]:
        """Return the indices of this scheduler's optimizers in a list of optimizers."""
        mine = [prepared.optimizer for prepared in self._owners()]
        return [index for index, other in enumerate(optimizers) if any(other is optimizer for optimizer in mine)]

    def _owners(self) -> list[AcceleratedOptimizer]:
        # the scheduler may have been made with the prepared optimizer, which wraps the user's optimizer
        owner = getattr(self.scheduler.optimizer, "optimizer", self.scheduler.optimizer)
        return [prepared for prepared in self._optimizers if prepared.optimizer is owner] or self._optimizers

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while this object is being copied, `scheduler` is not set yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"
