"""The loaders that `Accelerator.prepare` returns, and the gathering of values for their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from instep.accelerator.resuming import Opening, RestoredPlace, Uses, most_kept
from instep.data import PreparedLoader
from instep.data.prefetch import batches_through
from instep.distributed import gather, gather_object, gather_ragged, send_to_device
from instep.distributed.nested import iter_leaves, map_leaves, tensor_leaves
from instep.errors import DataError, DistributedError, RemoteError, UsageError
from instep.state.runs import GradientRecord
from instep.types import ReadOnly, StateDict
from instep.utils.checks import at_least
from instep.utils.warn import warn_user


class AcceleratedLoader:
    """Prepared loader, which yields this rank's batches on its device. Each pass over it is the next epoch.

    While the loop uses a batch, `GradientState` knows whether this is the last batch of the epoch, and how many of its
    samples count.

    Args:
        source: source of the batches.
        gradient: gradient state, into which the loader writes the loop's position.
        uses: the Accelerator's `Uses`, which reports that the script has used a batch.
        device: device that batches are moved to; None if batches are not moved.
        non_blocking: whether the host goes on while batches are copied from pinned memory.
        restore_position: as in `DataLoaderConfiguration`.
        name: name in checkpoints; None for a name made from the data set.
        kind: class that `isinstance` sees; None for the class of the user's loader.
        optimizers: the prepared optimizers. If there are any, a pass that has no batch gives a warning, except under
            `no_grad`.

    Attributes:
        batch_idx: index of the current batch in the epoch, from 0; -1 before the first batch.
        epoch: the epoch of the pass that runs or ran last; -1 before the first.
        batches_done: how many batches of the epoch were trained on, which means that `backward` was called or an
            optimizer has stepped after them. None if neither has happened in this pass yet.
        trains: whether the loop has trained on this loader, in this pass or an earlier one.
        full_batches: batch index below which all batches have the same weight.
        reliable: whether the sizes of the accumulation windows were known when the pass began.
        opening: record of the first batches of the pass, until the script has used one of them; then None.
        reads_ahead: whether the script requested batches before it used the earlier ones, in the previous pass.
    """

    def __init__(
        self,
        source: PreparedLoader,
        gradient: GradientRecord,
        uses: Uses,
        device: torch.device | None,
        non_blocking: bool = False,
        restore_position: bool | str = "auto",
        name: str | None = None,
        kind: type | None = None,
        optimizers: Sequence[Any] = (),
    ) -> None:
        self.source = source
        self._optimizers = optimizers
        self._kind = kind or (type(source.loader) if isinstance(source.loader, DataLoader) else AcceleratedLoader)
        self.name = name
        self.batch_idx = -1
        self.epoch = -1
        self.batches_done: int | None = None
        self.trains = False
        self.full_batches = 0
        self.reliable = True
        self.opening: Opening | None = None
        self.reads_ahead = False
        self._gradient = gradient
        self._uses = uses
        self._device = device
        self._non_blocking = non_blocking
        self._restore_position = restore_position
        self._next_epoch = 0
        # finished batches of the epoch as the loaded state counts them, minus those as the source counts them; not 0 if
        # a different number of ranks saved the state, since their batches had other sizes
        self._others = 0
        self._pass: object = None  # identifies the running pass: an iterator of an older pass raises an error
        # position that `load_state` restored; None once the script has used a batch
        self._restored: RestoredPlace | None = None
        # number of batches that the script held when it first used one in the last pass, and by how many batches it
        # reads ahead
        self._held, self._ahead = 1, 0

    # ---- attributes of a DataLoader

    dataset: ReadOnly[Any] = ReadOnly(lambda a: a.source.dataset, "The user's data set.")
    batch_size: ReadOnly[int | None] = ReadOnly(lambda a: a.source.batch_size, "Samples per rank and batch, if known.")

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch of all ranks together; None if unknown."""
        size = self.source.batch_size
        return None if size is None else size * self.source.world_size

    is_last: ReadOnly[bool] = ReadOnly(lambda a: a.source.share.last, "Whether the current batch is the epoch's last.")

    def __len__(self) -> int:
        return len(self.source)

    @property
    def next_epoch(self) -> int:
        """Epoch of the next pass, from 0. After `load_state` it is the epoch that the pass continues or begins."""
        place = self._unused_place()
        return self._next_epoch if place is None else place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. The seed and the epoch decide the order of the samples in a pass."""
        place = self._unused_place()
        if place is not None and place.epoch != epoch:
            # the script has chosen another epoch than the restored one, so drop the restored position
            self._restored = None
        self._next_epoch = epoch
        if self._pass is None:
            # the source calls `set_epoch` of the user's samplers and data sets at once, not when the pass begins
            self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self.passes_from(None)

    def passes_from(self, batches: int | None) -> Iterator[Any]:
        """Yield the batches of one pass, without the first `batches` batches of the epoch.

        If `batches` is None, the pass begins at a restored position, or else at the epoch's beginning.
        """
        gradient = self._gradient
        place = self._begin(batches)
        self._pass = this = object()
        gradient.dataloader_references = [
            *(other for other in gradient.dataloader_references if other is not self),
            self,
        ]
        goes_on, offers = batches is None and self._restore_position is not False, self._restore_position == "auto"
        self.opening = opening = Opening(self, self._uses, iter(self.source), place, goes_on, offers)
        try:
            for self.batch_idx, batch in opening.batches():
                self._show()
                yield batch
                self._check(this)
            if not opening.outlasts:
                self._end_opening(opening)
            for batch in opening.rest:
                self.batch_idx += 1
                self._show()
                yield batch
                if self._pass is not this:
                    self._check(this)
            self.trains, self.batches_done = self.trains or self.batches_done is not None, None
            if self.batch_idx < 0 and self._optimizers and torch.is_grad_enabled():
                empty = "; ".join(self.source.empty_parts())
                warn_user(f"a pass over a prepared loader ({empty}) had no batch. Is its data empty?")
        finally:
            if self._pass is this:
                if not opening.outlasts:
                    self._end_opening(opening)
                references = [other for other in gradient.dataloader_references if other is not self]
                gradient.dataloader_references, self._pass = references, None
                if gradient.active_dataloader is self:
                    if references:
                        references[-1]._show()
                    else:
                        gradient.active_dataloader, gradient.end_of_dataloader, gradient.remainder = None, False, -1
            if not opening.outlasts:
                opening.stop_watching()
        if not opening.outlasts:
            opening.end()
        done = 0 if place is None else place.batches
        # The restored epoch has no batch left, so go on with the next epoch.
        if opening.is_empty and place is not None and done and batches in (None, done):
            self._restored = place.next_epoch()
            if batches is None:
                yield from self.passes_from(None)

    def _begin(self, batches: int | None) -> RestoredPlace | None:
        """Move the source to the first batch of a pass. Return the restored position where the pass begins, or None."""
        source, place = self.source, self._unused_place()
        if self.opening is not None and self.opening.outlasts:
            self._end_opening(self.opening)
        if place is not None and self.trains:
            place.go(source)
            self._next_epoch = place.epoch
        else:
            self._restored = place = None
            source.set_epoch(self._next_epoch)
        if batches is None and place is not None and self._restore_position is False:
            batches = 0
        elif batches is not None and place is not None and batches != place.batches:
            warn_user(
                f"skip_first_batches(loader, {batches}) after load_state: {place.batches} batches of the epoch were "
                "done when the state was saved, so some come again or are left out. Skip as many as were done, or none"
            )
        self._others = 0
        if batches is not None and (place is None or batches != place.batches):
            source.start_at(batches)
        elif place is not None:
            self._others = place.batches - source.first_batch
        self.epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        self.trains = self.trains or self.batches_done is not None
        self.batch_idx = source.first_batch - 1
        self.batches_done = None
        self._ahead = 0
        self.set_windows(self._gradient.num_steps)
        return place

    def _check(self, this: object) -> None:
        if self._pass is not this:
            raise UsageError(
                "this loader was iterated anew before this pass over it had ended. Prepare a second loader for "
                "a loop within the loop."
            )

    def _end_opening(self, opening: Opening) -> None:
        if self.opening is opening:
            opening.look()
            if opening.used:
                self._held, self._ahead = opening.held, opening.ahead
                self.reads_ahead = opening.always_ahead is True
            self.opening = None
            if opening.outlasts:
                opening.end()

    def set_windows(self, num_steps: int) -> None:
        """Set the number of batches in a window of accumulated gradients."""
        read_ahead = 0 if self._restored is None else most_kept(num_steps, self._held)
        # a checkpoint may hold the position at the beginning of an accumulation window, so the source remembers the
        # positions of one window
        self.source.history = num_steps + max(read_ahead, self._held - 1)
        plan = self.source.plan
        self.full_batches = plan.full_batches(num_steps)
        self.reliable = num_steps == 1 or not plan.corrects

    def _show(self) -> None:
        """Make this loader the active one in the gradient state.

        This is done with every batch, since an inner loop over another loader may be left early.
        """
        source, gradient = self.source, self._gradient
        gradient.active_dataloader = self
        share = source.share
        gradient.end_of_dataloader = share.last
        gradient.remainder = share.all if share.last and share.all is not None else -1

    def moved(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches on this rank's device."""
        device = self._device
        if device is None or device.type == "cpu":
            return batches
        non_blocking = self._non_blocking or device.type == "cuda"
        return batches_through(batches, [partial(send_to_device, device=device, non_blocking=non_blocking)], device)

    active: ReadOnly[Any] = ReadOnly(lambda a: a._gradient.active_dataloader, "The innermost loader that is iterated.")

    @property
    def most_kept(self) -> int:
        """Largest number of batches that a pass keeps for a script that may skip them; see the function `most_kept`."""
        return most_kept(self._gradient.num_steps, self._held)

    # ---- checkpoints

    place: ReadOnly[tuple[int, int]] = ReadOnly(lambda a: (a.epoch, a.batch_idx), "Epoch and index of the batch in it.")

    def state_dict(self, window_begin: int | None = None, untrained: bool = False) -> StateDict:
        """Return the loop's position in this loader: the epoch, and how many of its batches are done.

        A position that `load_state` restored is returned again until the script uses a batch. In a loop that trains on
        the loader, a batch is done once `accelerator.backward` was called for it, or a prepared optimizer has stepped
        after it. In any other loop, every yielded batch is done, also the current one. After a pass that such a loop
        left early, the next pass is the next epoch.

        Args:
            window_begin: index of the first batch of an open accumulation window. This batch and later ones do not
                count as done.
            untrained: whether the loop will train, and has trained on no loader yet.
        """
        place, done = self._unused_place(), self.batches_done
        if place is not None:
            return place.state
        trains = self.trains or done is not None or untrained
        about = {"trains": trains, "held": self._held, "reads_ahead": self.reads_ahead}
        if self.opening is not None and self.opening.used:
            about |= {"held": self.opening.held, "reads_ahead": self.opening.ahead > 0}
            if self.opening.is_unsure:
                warn_user(
                    "the script holds several batches, and which of them it has used is not known without "
                    "accelerator.backward: this state counts all of them as done"
                )
        if done is None:
            left = self.opening.ahead if self.opening is not None and self.opening.outlasts else 0
            if self._pass is None and not left:
                return {"epoch": self._next_epoch, "source": None, **about}
            done = self.source.first_batch if trains and not left else self.batch_idx + 1 - left
        else:
            done -= self._ahead if self.opening is None else self.opening.ahead
        if window_begin is not None:
            done = min(done, window_begin)
        done = max(done, self.source.first_batch)
        return {"epoch": self.epoch, "source": self.source.state_dict(done), "batches": done + self._others, **about}

    def load_state_dict(self, state: StateDict) -> None:
        """Make the next pass begin at the position in the state."""
        source, epoch, batches = self.source, int(state["epoch"]), 0
        if state["source"] is None:
            source.set_epoch(epoch + 1)  # set_epoch drops the position that an earlier state has set
        else:
            source.load_state_dict(state["source"])
            batches = state.get("batches", source.first_batch)
            if state["source"].get("finished") or (source.plan.total_is_final and source.first_batch >= len(source)):
                epoch, batches = epoch + 1, 0  # no batch is left in the saved epoch
                source.set_epoch(epoch)
        self._next_epoch, self.opening = epoch, None
        self.trains = state.get("trains", state["source"] is not None)
        self._held, self.reads_ahead = state.get("held", 1), state.get("reads_ahead", False)
        self._restored = RestoredPlace(state, epoch, batches)

    def _unused_place(self) -> RestoredPlace | None:
        if self.opening is not None:
            self.opening.look()
        return self._restored

    def use_up(self, place: RestoredPlace) -> None:
        """Drop the position that `load_state` restored, since the script has now used a batch after this position."""
        if self._restored is place:
            self._restored = None

    def forget_beginning(self) -> None:
        """Drop the restored position if it is the beginning of an epoch and no pass over this loader is running."""
        if self._pass is None and self._restored is not None and self._restored.state["source"] is None:
            self._restored = None

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.__dict__.get("_kind", AcceleratedLoader)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle only the user's loader, since the position in this prepared loader belongs to the run."""
        return _itself, (self.source.loader,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source.loader, name)

    def close(self) -> None:
        """End worker processes, and stop watching batches of a finished pass that the script still holds."""
        if self.opening is not None and self.opening.outlasts:
            self._end_opening(self.opening)
        self.source.close()


class _WithoutFirst:
    """Wrapper of a loader or a batch sampler that reads the first items of each pass, and does not yield them.

    Args:
        inner: any iterable; the wrapper also has its attributes.
        num_batches: number of items to leave out of each pass.
    """

    def __init__(self, inner: Any, num_batches: int) -> None:
        self.inner = inner
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(self.inner, self.num_batches, None)

    def __len__(self) -> int:
        return max(0, len(self.inner) - self.num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while this object is being copied, `inner` is not set yet
            raise AttributeError(name)
        return getattr(self.inner, name)


class SkippedLoader(_WithoutFirst):
    """Next pass of a prepared loader, without the first batches of its epoch; see `skip_first_batches`."""

    inner: AcceleratedLoader

    def __iter__(self) -> Iterator[Any]:
        return self.inner.passes_from(self.num_batches)


def _skip_unprepared(loader: Any, num_batches: int) -> Any:
    """Skip batches of a loader that was not prepared.

    If it is a plain DataLoader with a length, the result can be prepared.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return _WithoutFirst(loader, num_batches)
    same = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    more = ("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order")
    options = {name: getattr(loader, name) for name in (*same, *more)}
    return DataLoader(loader.dataset, batch_sampler=_WithoutFirst(loader.batch_sampler, num_batches), **options)


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Make a loader whose passes leave out the first batches of each epoch.

    `num_batches` counts from the epoch's beginning, also after `load_state`: if 100 batches were done at the save,
    `skip_first_batches(loader, 100)` begins at batch 100, and not at batch 200. Pass the number that was done at the
    save, even if another number of processes saved the state. `gather_for_metrics` stays exact: it knows which samples
    count.

    Args:
        loader: a prepared loader. For any other loader, the first batches of each pass are left out.
        num_batches: number of batches to leave out.

    Returns:
        The new loader.

    Raises:
        SettingError: `num_batches` is negative.

    Example:
        >>> import torch
        >>> from instep.accelerator import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(6), batch_size=2))
        >>> [batch.tolist() for batch in skip_first_batches(loader, 1)]
        [[2, 3], [4, 5]]
        >>> accelerator.end_training()
    """
    at_least(0)("num_batches", num_batches)
    prepared = issubclass(type(loader), AcceleratedLoader)
    return SkippedLoader(loader, num_batches) if prepared else _skip_unprepared(loader, num_batches)


def _itself(loader: Any) -> Any:
    return loader


def gather_rows(data: Any, loader: AcceleratedLoader | None) -> Any:
    """Concatenate the tensors of all ranks, which must have the same number of rows. Collective.

    Args:
        data: nested tensors.
        loader: loader of the current batch, or None.

    Raises:
        DistributedError: ranks have different numbers of rows; in a loader's last batch, the error text names the
            method to use there.
    """
    try:
        return gather(data)
    except RemoteError:
        raise
    except DistributedError as error:
        if loader is None or not loader.is_last:
            raise
        raise DistributedError(
            f"{error}\nThis is the loader's last batch, of which ranks have different numbers of samples: use "
            "accelerator.gather_for_metrics, which gives each sample once."
        ) from error


def gather_samples(
    data: Any, samples: int | None, batch_size: int | None, use_gather_object: bool, per_sample: bool
) -> Any:
    """Gather every rank's values, each sample once; see `Accelerator.gather_for_metrics`. Collective.

    Args:
        data: nested tensors, or a list of objects.
        samples: number of this rank's samples in the current batch; 0 if the rank replays a batch, None if unknown, as
            outside of a loader.
        batch_size: number of samples in a full batch of the loader, if known. Data with this number of rows is cut to
            `samples` rows.
        use_gather_object: as in `Accelerator.gather_for_metrics`.
        per_sample: whether dimension 0 is the sample.
    """
    if use_gather_object or not any(isinstance(leaf, Tensor) for _, leaf in iter_leaves(data)):
        if not isinstance(data, (list, tuple)):
            raise DataError(
                f"gather_for_metrics takes tensors, or a list of objects with an entry per sample; got "
                f"{type(data).__name__}. For one object per rank use instep.distributed.gather_object."
            )
        rows = [] if samples == 0 else list(data)
        return gather_object(_rows(rows, samples, batch_size) if samples and per_sample else rows)
    # if a leaf is not a tensor, tensor_leaves raises an error that names gather_for_metrics
    tensor_leaves(data, "gather_for_metrics")
    if samples and per_sample:
        data = map_leaves(lambda leaf: _rows_of_leaf(leaf, samples, batch_size), data)
    return gather_ragged(data, 0 if samples == 0 else None)


def cut_last(data: Any, samples: int | None, batch_size: int | None) -> Any:
    """Cut tensors that have as many rows as a full batch to the number of samples in the last batch of a pass."""

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == batch_size
        return leaf[:samples] if whole and samples is not None else leaf

    return map_leaves(cut, data)


def _rows_of_leaf(leaf: Any, samples: int, batch_size: int | None) -> Any:
    return _rows(leaf, samples, batch_size) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _rows(values: Any, samples: int, batch_size: int | None) -> Any:
    """Return one row per sample: all rows, or only the first `samples` rows if there are as many as in a full batch."""
    padded = batch_size is not None and len(values) == batch_size > samples
    if len(values) != samples and not padded:
        raise DataError(
            f"gather_for_metrics got {len(values)} rows for a batch of {samples} samples on this rank. Give one row "
            "per sample of the batch in hand (the last batch may be smaller than batch_size), or say per_sample=False."
        )
    return values[:samples]
