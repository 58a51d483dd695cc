"""Epochs and loaders without a batch: an error in training, a warning in evaluation."""

from __future__ import annotations

from instep.data import BatchSource
from instep.errors import DataError
from instep.trainer.context import RunContext
from instep.utils.warn import warn_user


def check_epoch(ctx: RunContext) -> None:
    """Raise where an epoch has ended without a batch: such a run would train nothing, and might never end."""
    at, source = ctx.position, ctx.source
    empty = "; ".join(source.empty_parts())
    if not at.batch and not at.skipped_rest:
        uneven = ""
        if source.world_size > 1 and ctx.settings.uneven == "stop":
            uneven = " One rank without a batch ends the epoch of all: Trainer(uneven='join') trains on the rest."
        raise DataError(
            f"epoch {at.epoch} had no batch: the training data ({empty}) gave none. An iterable that is empty, such as "
            "by a wrong path, gives none; and a generator gives its values once, in one epoch. Give data that can be "
            f"iterated again: a list, a DataLoader, a class whose __iter__ makes a new generator each time.{uneven}"
        )
    elif at.batch and empty:
        warn_user(f"a part of the training data gave no batch ({empty}): None stands in its place")


def warn(source: BatchSource, what: str, loader_idx: int) -> None:
    """Warn of a loader that gave no batch, where that was not known before: `Loaders` warns of others."""
    if source.num_batches != 0:
        empty = "; ".join(source.empty_parts())
        warn_user(f"loader {loader_idx} of the {what} data ({empty}) gave no batch: nothing was done with it")
