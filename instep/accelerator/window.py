"""Where a handwritten loop stands in its accumulation window, and what each of its losses weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from instep.distributed import all_reduce_
from instep.errors import UsageError
from instep.state import Run

if TYPE_CHECKING:
    from instep.accelerator.loader import AcceleratedLoader
    from instep.accelerator.wrappers import AcceleratedOptimizer


class Window:
    """The accumulation window of one Accelerator.

    A window belongs to the loader that is trained on: its place is the batch's number, not a count of calls. So
    leaving an evaluation loop early moves nothing, a second `accumulate` for the same batch (a GAN's two halves) stays
    in its micro-batch, and a resumed epoch goes on in the same windows.

    Args:
        run: whose gradient record is written.
        num_processes: over which gradients are averaged.
        device: where counts of items are summed.
    """

    def __init__(self, run: Run, num_processes: int, device: torch.device) -> None:
        self._gradient = run.gradient
        self._num_processes = num_processes
        self._device = device
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self.loader: AcceleratedLoader | None = None
        """The loader whose batch was trained on last; None where windows do not end with one."""
        self.length = run.gradient.num_steps
        """Micro-batches of the open window so far, or of the one that ended last."""
        self.begin = 0
        """The number of its first batch."""
        self._places: dict[int, tuple[int, int]] = {}  # of the loaders that run, when they were looked at last
        self._stepped: tuple[AcceleratedLoader | None, dict[int, tuple[int, int]]] = None, {}  # the same, of steps
        self._calls = 0  # micro-batches of loops without a prepared loader
        self._entered = self._inside = False
        self._items: Tensor | float | None = None
        self._items_of_batch: Tensor | float | None = None
        self._plain = False
        self._factor: Tensor | float | None = None

    def enter(self, optimizers: Sequence[AcceleratedOptimizer]) -> bool:
        """Take the micro-batch in hand; whether it ends its window."""
        gradient = self._gradient
        moved = self._look()
        loader, num_steps = self.loader, gradient.num_steps
        if loader is not None and not moved and self._entered:
            self._inside = True
            return gradient.sync_gradients  # for this batch it was called before
        if loader is None:
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
        self._entered = self._inside = True
        self.length = place
        self.begin = 0 if loader is None else loader.batch_idx + 1 - place
        gradient.sync_gradients = ends
        return ends

    @property
    def running(self) -> list[AcceleratedLoader]:
        """The loaders that give batches now, the outermost first."""
        return self._gradient.dataloader_references

    def leave(self) -> None:
        """The micro-batch is done."""
        self._inside = False

    def _look(self) -> bool:
        """Find the loader that is trained on among those that run; whether its batch is another than last time.

        It stays the same as long as it gives batches. Else it is the outermost one that has: a batch of other data,
        pulled within the loop, makes no window.
        """
        if not self._gradient.sync_with_dataloader or not self.running:
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
        """An optimizer has stepped: the batch in hand is done, also where `backward` was not asked to compute it."""
        loader = self.loader
        if loader is not None and loader.batches_done == loader.batch_idx + 1:
            return
        if self.running:
            loader, places, _ = self._find(*self._stepped)
            self._stepped = loader, places
            loader.batches_done = loader.batch_idx + 1

    def weight(self) -> float:
        """What the mean loss of the batch in hand counts in its window, for the mean over all samples of all ranks."""
        if not self._inside:
            self._look()
        loader, num_steps = self.loader, self._gradient.num_steps
        if loader is None:
            return 1.0 / num_steps
        index = loader.batch_idx
        loader.batches_done = index + 1
        return 1.0 / num_steps if index < loader.full_batches else loader.source.window_scale(index, num_steps)

    def weigh_items(self, num_items: Tensor | float) -> Tensor | float:
        """The factor of a loss that is a mean over `num_items`; the window's sum is divided out before the step."""
        if not self._inside:
            raise UsageError(
                "backward(num_items=...) weighs the losses of a window by their items: say where its micro-batches "
                "begin and end by `with accelerator.accumulate(model):` around forward, backward and step."
            )
        if self._plain:
            raise _mixed()
        if self._items_of_batch is None:
            count = num_items.detach().to(self._device, self._dtype) if isinstance(num_items, Tensor) else num_items
            self._items = count if self._items is None else self._items + count
            self._items_of_batch = num_items
        elif self._items_of_batch is not num_items and self._items_of_batch != num_items:
            raise UsageError(
                "backward(num_items=...) got two different numbers for one micro-batch. Give the same number with "
                "each of its losses."
            )
        if self.loader is not None:
            self.loader.batches_done = self.loader.batch_idx + 1
        return num_items

    def weigh_plainly(self) -> float:
        """The factor of a loss that came without a number of items."""
        if not self._inside:
            self._items = None  # of a loop before this one
        elif self._items is not None:
            raise _mixed()
        self._plain = True
        return self.weight()

    @property
    def corrects(self) -> bool:
        """Whether the gradients of the window have to be corrected before they are looked at."""
        return self._entered and (self._items is not None or (self.loader is not None and not self.loader.reliable))

    def correction(self) -> Tensor | float | None:
        """What the gradients of a finished window must be multiplied by; None for nothing. Collective with items."""
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
        return self.loader.source.rescale(self.loader.batch_idx, self._gradient.num_steps)


def _mixed() -> UsageError:
    return UsageError(
        "backward() was called with num_items for some losses of a window and without for others, so their weights "
        "cannot be compared. Give num_items with every loss, or with none."
    )
