"""Loaders with which all ranks run the same number of steps, every sample counts once, and a pass can resume.

`prepare_loader` turns a user's loader into a `BatchSource`, the one thing that a loop iterates. README.md in this
folder lists the files in reading order, the invariants, and what can fail.

Each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.data.base import BatchSource as BatchSource
    from instep.data.base import PreparedLoader as PreparedLoader
    from instep.data.combined import CombinedLoader as CombinedLoader
    from instep.data.config import DataLoaderConfiguration as DataLoaderConfiguration
    from instep.data.config import resolve_limit as resolve_limit
    from instep.data.lengths import LengthBucketBatchSampler as LengthBucketBatchSampler
    from instep.data.lengths import PackedDataset as PackedDataset
    from instep.data.loader import prepare_loader as prepare_loader
    from instep.data.mixture import MixtureSampler as MixtureSampler
    from instep.data.module import DataModule as DataModule
    from instep.data.sampler import ShardedBatches as ShardedBatches
    from instep.data.sampler import ShardedBatchSampler as ShardedBatchSampler
    from instep.data.tune import tune_loader as tune_loader
    from instep.streams.dataset import StreamDataset as StreamDataset
    from instep.streams.mixture import StreamMixture as StreamMixture
    from instep.streams.packing import PackedStream as PackedStream

__all__, __getattr__, __dir__ = loads(__name__)
