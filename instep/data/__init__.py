"""Loaders whose every rank runs the same number of steps, counts every sample once, and resumes where it stopped."""

from instep.data.base import BatchSource, PreparedLoader
from instep.data.combined import CombinedLoader
from instep.data.limits import resolve_limit
from instep.data.loader import prepare_loader
from instep.data.module import DataModule
from instep.data.sampler import ShardedBatches, ShardedBatchSampler

__all__ = [
    "BatchSource",
    "CombinedLoader",
    "DataModule",
    "PreparedLoader",
    "ShardedBatchSampler",
    "ShardedBatches",
    "prepare_loader",
    "resolve_limit",
]
