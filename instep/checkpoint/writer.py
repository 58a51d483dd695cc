"""Writers of a save. Every file of a checkpoint is recorded here, also files that others wrote."""

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
    """Writer of states as files. The subclass chooses where the files go.

    All ranks share one folder, so put the rank into the names of per-rank files.

    Args:
        rank: this process.
        world_size: the number of ranks that save.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abstractmethod
    def put(self, name: str, *content: Data) -> None:
        """Write a file of these bytes.

        Args:
            name: the file name.
            content: contiguous buffers, which are joined.

        Raises:
            CheckpointError: the disk is full, or the like.
        """

    @abstractmethod
    def tensors(
        self, name: str, tensors: Mapping[str, Tensor | Shard], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Write a safetensors file.

        Args:
            name: the file name, such as "model.safetensors".
            tensors: name -> tensor, or this rank's part of a tensor. A shared tensor is stored once.
            metadata: strings for the file's header.

        Raises:
            UnsavableStateError: a tensor cannot be stored.
            CheckpointError: the disk is full, or the like.
        """

    def json(self, name: str, value: Any) -> None:
        """Write plain JSON. For other values use `state`, which keeps every type.

        Args:
            name: the file name, such as "data.json".
            value: JSON values; nan and inf are refused, tuples become lists.

        Raises:
            UnsavableStateError: the value is not JSON.
            CheckpointError: the disk is full, or the like.
        """
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UnsavableStateError(
                f"{name} is not JSON: {error}. Save it with writer.state(...) instead."
            ) from error
        self.put(name, text.encode())

    def state(self, base: str, tree: Any) -> None:
        """Write a state: `<base>.json`, and `<base>.safetensors` if it holds tensors.

        Args:
            base: the file name without an ending, such as "optimizer".
            tree: a state that `encode` accepts.

        Raises:
            UnsavableStateError: some value cannot be encoded; the text has its path.
            CheckpointError: the disk is full, or the like.
        """
        json_tree, tensors = encode(tree, base)
        if tensors:
            self.tensors(f"{base}.safetensors", tensors)
        self.json(f"{base}.json", json_tree)


class Writer(BaseWriter):
    """Writer of one rank's files into a checkpoint that is being saved.

    `CheckpointStore.save` makes it, and passes it to your function.

    Args:
        folder: the hidden folder that is being written. Every other file that is put there becomes part of the
            checkpoint too.
        files: the file operations.
        rank: the rank of this process.
        world_size: the number of ranks that save.

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
    """Return the name; raise SettingError if a file of a checkpoint cannot have it."""
    if not is_plain_name(name):
        raise SettingError(f"{name!r} cannot name a file of a checkpoint: give a plain, visible name", got=name)
    return name
