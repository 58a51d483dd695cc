"""The on-disk format: atomic, verified, without pickle. README.md says why and what can fail."""

from instep.checkpoint.background import BackgroundSaver, PendingSave
from instep.checkpoint.encode import decode, encode
from instep.checkpoint.files import FileRecord, LocalFiles
from instep.checkpoint.manifest import Manifest
from instep.checkpoint.reader import Reader
from instep.checkpoint.resume import Resume, ResumeReport
from instep.checkpoint.retention import KeepAll, KeepAny, KeepBest, KeepEvery, KeepNewest, Retention, Saved
from instep.checkpoint.scan import CheckpointInfo, find_checkpoint, is_checkpoint
from instep.checkpoint.store import CheckpointStore
from instep.checkpoint.tensors import Shard, StoredTensor, read_tensors, write_tensors
from instep.checkpoint.weights import load_weights, merge, merge_in_parts, stored_weights
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
