"""Save, verify, find and read checkpoints, in an on-disk format without pickle. README.md describes the format.

Each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.checkpoint.background import BackgroundSaver as BackgroundSaver
    from instep.checkpoint.background import PendingSave as PendingSave
    from instep.checkpoint.codec import decode as decode
    from instep.checkpoint.codec import encode as encode
    from instep.checkpoint.files import LocalFiles as LocalFiles
    from instep.checkpoint.hashing import FileRecord as FileRecord
    from instep.checkpoint.manifest import Manifest as Manifest
    from instep.checkpoint.reader import Reader as Reader
    from instep.checkpoint.resume import Resume as Resume
    from instep.checkpoint.resume import ResumeReport as ResumeReport
    from instep.checkpoint.retention import KeepAll as KeepAll
    from instep.checkpoint.retention import KeepAny as KeepAny
    from instep.checkpoint.retention import KeepBest as KeepBest
    from instep.checkpoint.retention import KeepEvery as KeepEvery
    from instep.checkpoint.retention import KeepNewest as KeepNewest
    from instep.checkpoint.retention import Retention as Retention
    from instep.checkpoint.retention import Saved as Saved
    from instep.checkpoint.scan import CheckpointInfo as CheckpointInfo
    from instep.checkpoint.scan import find_checkpoint as find_checkpoint
    from instep.checkpoint.scan import is_checkpoint as is_checkpoint
    from instep.checkpoint.store import CheckpointStore as CheckpointStore
    from instep.checkpoint.tensors import Shard as Shard
    from instep.checkpoint.tensors import StoredTensor as StoredTensor
    from instep.checkpoint.tensors import read_tensors as read_tensors
    from instep.checkpoint.tensors import write_tensors as write_tensors
    from instep.checkpoint.weights import load_weights as load_weights
    from instep.checkpoint.weights import merge as merge
    from instep.checkpoint.weights import merge_in_parts as merge_in_parts
    from instep.checkpoint.weights import stored_weights as stored_weights
    from instep.checkpoint.writer import Writer as Writer

__all__, __getattr__, __dir__ = loads(__name__)
