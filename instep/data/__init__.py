"""Loaders whose every rank runs the same number of steps, counts every sample once, and resumes where it stopped.

`prepare_loader` turns a user's loader into a `BatchSource`, the one thing that a loop iterates. What stands behind it:

- `sampler`: the order and its spreading over ranks, a pure function of (seed, epoch, cursor). Where instep owns the
  order (`index`), a position is a number of samples, and resuming is arithmetic at any world size and worker count.
- `stream`: loaders used as they are. Their own state, or reading again, brings them back; ranks agree on each batch
  before it is used if the data has no length.
- `dispatch`: one process reads, in one of the two ways above, and sends every rank its part, for data that would be
  the same on every rank.
- `combined`: several of them as one.
- `seeding`: random augmentation depends on the batch (or sample), not on how far ahead it is read, on the training,
  or on the workers.

What can fail: samplers that draw from generators nobody can seed (found by comparing the ranks' orders), loaders that
break their length, data that changed since the checkpoint, and streams resumed at another world size (all refused).

A name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

_HOME = {
    "BatchSource": "base",
    "CombinedLoader": "combined",
    "DataLoaderConfiguration": "config",
    "DataModule": "module",
    "PreparedLoader": "base",
    "ShardedBatchSampler": "sampler",
    "ShardedBatches": "sampler",
    "prepare_loader": "loader",
    "resolve_limit": "config",
}

if TYPE_CHECKING:
    from instep.data.base import BatchSource as BatchSource
    from instep.data.base import PreparedLoader as PreparedLoader
    from instep.data.combined import CombinedLoader as CombinedLoader
    from instep.data.config import DataLoaderConfiguration as DataLoaderConfiguration
    from instep.data.config import resolve_limit as resolve_limit
    from instep.data.loader import prepare_loader as prepare_loader
    from instep.data.module import DataModule as DataModule
    from instep.data.sampler import ShardedBatches as ShardedBatches
    from instep.data.sampler import ShardedBatchSampler as ShardedBatchSampler

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
