"""Reading a checkpoint: each file is verified before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from instep.checkpoint.encode import decode
from instep.checkpoint.hashing import FileRecord, Hasher
from instep.checkpoint.manifest import Manifest, read_manifest
from instep.checkpoint.remote import files_of
from instep.checkpoint.retry import patiently
from instep.checkpoint.tensors import read_tensors
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError


class Reader:
    """Reads the files of one checkpoint. Local to this process.

    Args:
        path: the checkpoint's folder.
        verify: hold each file against its checksum when it is first read. False is for a checkpoint that this job has
            verified already.

    Raises:
        CheckpointNotFoundError: the folder has no manifest.
        CorruptCheckpointError: the manifest is damaged.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._unverified = set(self.manifest.files) if verify else set()

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a file of that name."""
        return name in self.manifest.files

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a safetensors file, on the CPU, under all their names.

        Raises:
            CheckpointNotFoundError: the checkpoint has no such file.
            CorruptCheckpointError: the file is not what was written.
        """
        path = self._listed(name)

        def read() -> dict[str, Tensor]:
            with files_of(path).fetched(path, name in self._unverified) as (local, record):
                if record is not None:
                    self._settle(name, _difference(name, record, self.manifest.files[name]))
                return read_tensors(local)

        try:
            return patiently(read)
        except OSError as error:
            raise self._corrupt(_unreadable(name, error)) from error

    def json(self, name: str) -> Any:
        """The value of a JSON file; raises like `tensors`."""
        path = self._listed(name)
        try:
            data = patiently(lambda: files_of(path).read(path))
        except OSError as error:
            raise self._corrupt(_unreadable(name, error)) from error
        if name in self._unverified:
            hasher = Hasher()
            hasher.update(data)
            self._settle(name, _difference(name, hasher.record(), self.manifest.files[name]))
        try:
            return json.loads(data)
        except ValueError as error:
            raise self._corrupt(f"{name} is not JSON: {error}") from error

    def state(self, base: str) -> Any:
        """What `Writer.state` wrote; raises like `tensors`."""
        tensors = f"{base}.safetensors"
        return decode(self.json(f"{base}.json"), self.tensors(tensors) if self.has(tensors) else {})

    def _listed(self, name: str) -> Path:
        if name not in self.manifest.files:
            raise CheckpointNotFoundError(
                f"{self.path} has no {name}; it has {', '.join(sorted(self.manifest.files)) or 'no files'}",
                path=self.path,
            )
        return self.path / name

    def _settle(self, name: str, problem: str | None) -> None:
        if problem is not None:
            raise self._corrupt(problem)
        self._unverified.discard(name)

    def _corrupt(self, problem: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path} is damaged: {problem}. Use another checkpoint.", path=self.path)


def file_problem(path: Path, record: FileRecord) -> str | None:
    """What is wrong with a file of a checkpoint; None where it is what was written."""
    files = files_of(path)
    try:
        size = patiently(lambda: files.size(path))
        if size != record.bytes:  # no need to read it
            return f"{path.name} has {size:,} bytes instead of {record.bytes:,}"
        return _difference(path.name, patiently(lambda: files.hash(path)), record)
    except OSError as error:
        return _unreadable(path.name, error)


def folder_problems(folder: Path) -> list[str]:
    """What is wrong with a checkpoint: empty where it verifies. Reads every byte of it."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    found = (file_problem(folder / name, record) for name, record in manifest.files.items())
    return [problem for problem in found if problem is not None]


def _difference(name: str, got: FileRecord, expected: FileRecord) -> str | None:
    if got == expected:
        return None
    if got.bytes != expected.bytes:
        return f"{name} has {got.bytes:,} bytes instead of {expected.bytes:,}"
    parts = [str(i) for i, (a, b) in enumerate(zip(got.chunks, expected.chunks, strict=False)) if a != b]
    where = f" in 64 MiB chunk {', '.join(parts)}" if parts else ""
    return f"{name} differs{where} from what was written (checksum {got.xxh3} instead of {expected.xxh3})"


def _unreadable(name: str, error: OSError) -> str:
    reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
    return f"{name} {reason}"
