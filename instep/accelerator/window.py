"""Where a handwritten loop stands in its accumulation window, and what each of its losses weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep.distributed import all_reduce_
from instep.errors import SettingError, UsageError
from instep.state import Run

if TYPE_CHECKING:
    from instep.accelerator.loader import AcceleratedLoader
    from instep.accelerator.wrappers import AcceleratedOptimizer


class Window:
    """The accumulation window of one Accelerator.

    A window belongs to the loader whose batch is in hand: its place is the batch's number, not a count of calls. So
    leaving an evaluation loop early moves nothing, and a resumed epoch goes on in the same windows.

    Args:
        run: whose gradient record is written.
        num_processes: over which gradients are averaged.
        device: where counts of items are summed.
    """

    def __init__(self, run: Run, num_processes: int, device: torch.device) -> None:
        self._run = run
        self._gradient = run.gradient
        self._num_processes = num_processes
        self._device = device
        self._calls = 0  # micro-batches of loops without a prepared loader
        self._entered = False
        self.length = run.gradient.num_steps
        """Micro-batches of the window that ended last."""
        self._items: Tensor | float | None = None
        self._items_of_batch: Tensor | float | None = None
        self._plain = False
        self._factor: Tensor | float | None = None

    @property
    def loader(self) -> AcceleratedLoader | None:
        """The loader whose batch is in hand, if windows end with it."""
        return self._gradient.active_dataloader if self._gradient.sync_with_dataloader else None

    def enter(self, optimizers: Sequence[AcceleratedOptimizer]) -> bool:
        """Take the next micro-batch; whether it ends its window."""
        gradient, loader = self._gradient, self.loader
        if loader is None:
            place = self._calls % gradient.num_steps + 1
            self._calls += 1
            first, ends = place == 1, place == gradient.num_steps
        else:
            place = loader.batch_idx % gradient.num_steps + 1
            first = place == 1 or loader.batch_idx == loader.source.first_batch
            ends = place == gradient.num_steps or loader.is_last
        if first or not self._entered:
            abandoned = self._entered and not gradient.sync_gradients
            self._items = self._factor = None
            self._plain = False
            self._entered = True
            for optimizer in optimizers:
                optimizer.begin_window(abandoned)
        self._items_of_batch = None
        self.length = place
        gradient.sync_gradients = ends
        return ends

    def weight(self) -> float:
        """What the mean loss of the batch in hand counts in its window, for the mean over all samples of all ranks."""
        loader, num_steps = self.loader, self._gradient.num_steps
        if loader is None:
            return 1.0 / num_steps
        index = loader.batch_idx
        if index < loader.full_batches:
            return 1.0 / num_steps
        return loader.source.window_scale(index, num_steps)

    def weigh_items(self, num_items: Tensor | float) -> Tensor | float:
        """The factor of a loss that is a mean over `num_items`; the window's sum is divided out before the step."""
        if not self._entered:
            raise UsageError(
                "backward(num_items=...) weighs the losses of a window by their items: say where its micro-batches "
                "begin and end by `with accelerator.accumulate(model):` around forward, backward and step."
            )
        if self._plain:
            raise _mixed()
        if self._items_of_batch is None:
            count = num_items.detach().to(self._device, torch.float64) if isinstance(num_items, Tensor) else num_items
            self._items = count if self._items is None else self._items + count
            self._items_of_batch = num_items
        elif self._items_of_batch is not num_items and self._items_of_batch != num_items:
            raise UsageError(
                "backward(num_items=...) got two different numbers for one micro-batch. Give the same number with "
                "each of its losses."
            )
        return num_items

    def weigh_plainly(self) -> None:
        """A loss came without a number of items."""
        if self._items is not None:
            raise _mixed()
        self._plain = True

    def correction(self) -> Tensor | float | None:
        """What the gradients of a finished window must be multiplied by; None for nothing. Collective with items."""
        if self._factor is None:
            self._factor = self._compute()
        return None if isinstance(self._factor, float) and self._factor == 1.0 else self._factor

    def _compute(self) -> Tensor | float:
        if self._items is not None:
            total = torch.as_tensor(self._items, dtype=torch.float64, device=self._device).clone()
            return self._num_processes / all_reduce_(total).clamp_(min=1.0)
        loader = self.loader if self._entered else None
        return 1.0 if loader is None else loader.source.rescale(loader.batch_idx, self._gradient.num_steps)


def _mixed() -> UsageError:
    return UsageError(
        "backward() was called with num_items for some losses of a window and without for others, so their weights "
        "cannot be compared. Give num_items with every loss, or with none."
    )


def check_num_steps(num_steps: Any) -> int:
    """A number of micro-batches."""
    if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
        raise SettingError(
            f"gradient_accumulation_steps={num_steps!r} must be an integer of at least 1",
            field="gradient_accumulation_steps",
            got=num_steps,
        )
    return num_steps
