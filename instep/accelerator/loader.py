"""The loaders that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from instep.data import PreparedLoader
from instep.data.prefetch import prefetch
from instep.distributed import send_to_device
from instep.errors import SettingError, UsageError
from instep.state.runs import GradientRecord
from instep.types import StateDict


class AcceleratedLoader:
    """This rank's batches, on its device; each pass is the next epoch.

    While a batch is in hand, `GradientState` knows of it: whether it is the last, and how many of its samples count.

    Args:
        source: the batches.
        gradient: where the loop says where it stands.
        device: where the batches go; None leaves them where they are.
        non_blocking: do not wait for copies from pinned memory.
        name: its name in checkpoints; None: by its data.

    Attributes:
        batch_idx: number of the batch in hand, from 0 in an epoch; -1 before the first.
        epoch: the epoch of the pass that runs or ran last; -1 before the first.
    """

    def __init__(
        self,
        source: PreparedLoader,
        gradient: GradientRecord,
        device: torch.device | None,
        non_blocking: bool = False,
        name: str | None = None,
    ) -> None:
        self.source = source
        self.name = name
        self.batch_idx = -1
        self.epoch = -1
        self.full_batches = 0
        """Batches with a lower number weigh the same."""
        self._gradient = gradient
        self._device = device
        self._non_blocking = non_blocking
        self._next_epoch = 0
        self._ended = True

    # ---- what users of a DataLoader read

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self.source.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples per rank and batch; None when unknown."""
        return self.source.batch_size

    @property
    def total_batch_size(self) -> int | None:
        """Samples of all ranks' batches together; None when unknown."""
        size = self.source.batch_size
        return None if size is None else size * self.source.world_size

    @property
    def is_last(self) -> bool:
        """Whether the batch in hand is the epoch's last."""
        return self.source.is_last

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass this epoch: its order is a function of the seed and this number."""
        self._next_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self.passes_from(None)

    def passes_from(self, batches: int | None) -> Iterator[Any]:
        """One pass, after that many batches of the epoch; None: from its beginning, or where a checkpoint was."""
        source, gradient = self.source, self._gradient
        source.set_epoch(self._next_epoch)
        if batches is not None:
            source.start_at(batches)
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        self._ended = False
        source.history = gradient.num_steps  # a checkpoint within a window goes back to its beginning
        self.batch_idx = source.first_batch - 1
        self.full_batches = source.full_batches(gradient.num_steps)
        gradient.dataloader_references.append(self)
        try:
            for batch in self._on_device():
                self.batch_idx += 1
                # With every batch: a loop that was left early must not stay the active one.
                gradient.active_dataloader = self
                gradient.end_of_dataloader = source.is_last
                if source.is_last:
                    total = source.counts(self.batch_idx)[1]
                    gradient.remainder = -1 if total is None else total
                yield batch
            self._ended = True
        finally:
            gradient.dataloader_references = [other for other in gradient.dataloader_references if other is not self]
            if gradient.active_dataloader is self:
                gradient.active_dataloader = (gradient.dataloader_references or [None])[-1]
                gradient.end_of_dataloader = False
                gradient.remainder = -1

    def _on_device(self) -> Iterator[Any]:
        device = self._device
        if device is None or device.type == "cpu":
            return iter(self.source)
        if device.type == "cuda":
            return prefetch(self.source, partial(send_to_device, device=device, non_blocking=True), device)
        return (send_to_device(batch, device, self._non_blocking) for batch in self.source)

    # ---- checkpoints

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that were given out, the one in hand included."""
        return self.batch_idx + 1

    def state_dict(self, batches_done: int | None = None) -> StateDict:
        """Where the loader stands: the epoch, and the place in it.

        Args:
            batches_done: another number of batches than was given out: the window's beginning.
        """
        if self._ended:
            return {"epoch": self._next_epoch, "source": None}
        done = self.batches_done if batches_done is None else batches_done
        return {"epoch": self.epoch, "source": self.source.state_dict(done)}

    def load_state_dict(self, state: StateDict) -> None:
        """Make the next pass go on where the state says."""
        self._next_epoch = int(state["epoch"])
        self._ended = state["source"] is None
        if state["source"] is not None:
            self.source.load_state_dict(state["source"])

    def close(self) -> None:
        """Let go of worker processes."""
        self.source.close()


class SkippedLoader:
    """One loader's next pass, without its first batches; see `skip_first_batches`.

    Args:
        loader: the prepared loader.
        num_batches: how many of the epoch's batches to leave out.
    """

    def __init__(self, loader: AcceleratedLoader, num_batches: int) -> None:
        self.loader = loader
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        return self.loader.passes_from(self.num_batches)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def skip_first_batches(loader: Any, num_batches: int) -> SkippedLoader:
    """A loader whose passes leave out the first batches of their epoch.

    The number counts from the epoch's beginning, also after `load_state`: skipping what a restored loader has done
    already skips nothing twice. Which samples count stays known, so `gather_for_metrics` is exact.

    Args:
        loader: what `prepare` returned for a loader.
        num_batches: batches to leave out.

    Raises:
        UsageError: the loader is not prepared.
        SettingError: the number is negative.
    """
    if not isinstance(loader, AcceleratedLoader):
        raise UsageError(
            f"skip_first_batches takes what accelerator.prepare() returned for a loader; got {type(loader).__name__}"
        )
    if num_batches < 0:
        raise SettingError(f"num_batches={num_batches} must be at least 0", field="num_batches", got=num_batches)
    return SkippedLoader(loader, num_batches)
