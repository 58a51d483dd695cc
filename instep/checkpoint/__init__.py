"""The on-disk format: atomic, verified, without pickle. README.md says why and what can fail."""

from instep.checkpoint.background import BackgroundSaver, PendingSave
from instep.checkpoint.catalog import find_checkpoint, is_checkpoint
from instep.checkpoint.choose import CheckpointInfo
from instep.checkpoint.encode import decode, encode
from instep.checkpoint.files import FileRecord, LocalFiles
from instep.checkpoint.manifest import Manifest
from instep.checkpoint.merge import merge, merge_in_parts
from instep.checkpoint.reader import Reader
from instep.checkpoint.resume import Resume, ResumeReport
from instep.checkpoint.retention import KeepAll, KeepAny, KeepBest, KeepEvery, KeepNewest, Retention, Saved
from instep.checkpoint.shard import Shard, StoredTensor
from instep.checkpoint.store import CheckpointStore
from instep.checkpoint.tensors import read_tensors, write_tensors
from instep.checkpoint.weights import load_weights, stored_weights
from instep.checkpoint.writer import Writer

__all__ = [
    "BackgroundSaver",
    "CheckpointInfo",
    "CheckpointStore",
    "FileRecord",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepNewest",
    "LocalFiles",
    "Manifest",
    "PendingSave",
    "Reader",
    "Resume",
    "ResumeReport",
    "Retention",
    "Saved",
    "Shard",
    "StoredTensor",
    "Writer",
    "decode",
    "encode",
    "find_checkpoint",
    "is_checkpoint",
    "load_weights",
    "merge",
    "merge_in_parts",
    "read_tensors",
    "stored_weights",
    "write_tensors",
]
