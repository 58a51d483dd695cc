"""`Writer`: writes the files of one rank into a checkpoint, and records their sizes and checksums."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from instep.checkpoint.codec import encode
from instep.checkpoint.files import Files
from instep.checkpoint.hashing import Data, FileRecord
from instep.checkpoint.names import is_plain_name
from instep.checkpoint.tensors import Shard, write_tensors
from instep.errors import SettingError, UnsavableStateError


class BaseWriter(ABC):
    """Base class of writers of a checkpoint's files; a subclass defines where the content goes.

    All ranks write into the same folder, so the name of a file that each rank writes must contain the rank.

    Args:
        rank: rank of this process.
        world_size: number of ranks that save.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abstractmethod
    def put(self, name: str, *content: Data) -> None:
        """Write bytes to a file.

        Args:
            name: name of the file.
            content: contiguous buffers, which are written one after the other.

        Raises:
            CheckpointError: the file cannot be written, for instance because the disk is full.
        """

    @abstractmethod
    def tensors(
        self, name: str, tensors: Mapping[str, Tensor | Shard], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write a safetensors file.

        Args:
            name: name of the file, such as "model.safetensors".
            tensors: by name, a tensor or this rank's part of a tensor (a Shard). A tied tensor is stored once.
            metadata: strings to store in the file's header.

        Raises:
            UnsavableStateError: a tensor cannot be saved.
            CheckpointError: the file cannot be written, for instance because the disk is full.
        """

    def json(self, name: str, value: Any) -> None:
        """Write a value as a plain JSON file. For values of other types use `state`.

        Args:
            name: name of the file, such as "data.json".
            value: JSON values; tuples become lists, and nan and inf are refused.

        Raises:
            UnsavableStateError: the value cannot be written as JSON.
            CheckpointError: the file cannot be written, for instance because the disk is full.
        """
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UnsavableStateError(
                f"{name} is not JSON: {error}. Save it with writer.state(...) instead."
            ) from error
        self.put(name, text.encode())

    def state(self, base: str, tree: Any) -> None:
        """Write a state as `<base>.json`, and as `<base>.safetensors` too if it contains tensors; all types are kept.

        Args:
            base: name of the files without ending, such as "optimizer".
            tree: state of values that `codec.encode` accepts.

        Raises:
            UnsavableStateError: a value cannot be encoded; the message has its path in the state.
            CheckpointError: a file cannot be written, for instance because the disk is full.
        """
        json_tree, tensors = encode(tree, base)
        if tensors:
            self.tensors(f"{base}.safetensors", tensors)
        self.json(f"{base}.json", json_tree)


class Writer(BaseWriter):
    """Writes the files of one rank into a checkpoint. `CheckpointStore.save` calls your function with a Writer.

    Args:
        folder: folder of the checkpoint before its commit. Files that other code puts there become part of the
            checkpoint too.
        files: file operations of the folder's file system.
        rank: rank of this process.
        world_size: number of ranks that save.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from instep.checkpoint import CheckpointStore
        >>> def write(writer):
        ...     writer.tensors("model.safetensors", {"weight": torch.ones(2)})
        ...     writer.state("trainer", {"epoch": 3})
        ...     writer.json(f"rank-{writer.rank}.json", {"batches": 7})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = CheckpointStore(folder).save(1200, write)
        ...     sorted(file.name for file in path.iterdir())
        ['manifest.json', 'model.safetensors', 'rank-0.json', 'trainer.json']
    """

    def __init__(self, folder: Path, files: Files, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.records: dict[str, FileRecord] = {}
        self.folder = folder
        self._files = files

    def put(self, name: str, *content: Data) -> None:
        with self._files.create(self.folder / checked_name(name), sum(map(len, content))) as out:
            for data in content:
                out.write(data)
            self.records[name] = out.close()

    def tensors(
        self, name: str, tensors: Mapping[str, Tensor | Shard], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.records[name] = write_tensors(self.folder / checked_name(name), tensors, metadata, files=self._files)


def checked_name(name: str) -> str:
    """Return the name; raise SettingError if it is not allowed for a file of a checkpoint."""
    if not is_plain_name(name):
        raise SettingError(f"{name!r} cannot name a file of a checkpoint: give a plain, visible name", got=name)
    return name
