"""`Reader`: read the files of a checkpoint, each of which is verified before it is used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from instep.checkpoint.codec import decode
from instep.checkpoint.files import patiently
from instep.checkpoint.hashing import FileRecord, Hasher
from instep.checkpoint.lazy import LazyTensor, join_tensors, join_trees, read_all, read_parts
from instep.checkpoint.manifest import Manifest, read_manifest, refuse_link
from instep.checkpoint.names import MANIFEST, inside
from instep.checkpoint.remote import files_of
from instep.checkpoint.tensors import StoredTensor, read_tensors
from instep.distributed.nested import map_leaves
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from instep.utils.checks import choice
from instep.utils.untrusted_files import STATE_BYTES, parse_json

WEIGHT_SETS = ("live", "averaged")
"""Kinds of weights that a checkpoint can have: the weights that are trained, and their average."""


class Reader:
    """Read the files of one checkpoint in this process; no other rank takes part.

    Args:
        path: folder of the checkpoint.
        verify: whether to compare each file with its checksum when it is first read. Pass False only for a checkpoint
            that this job has verified.
        manifest: manifest of the checkpoint, if it has been read already.

    Raises:
        CheckpointNotFoundError: the folder has no manifest.
        CorruptCheckpointError: the manifest is damaged.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from instep.checkpoint import CheckpointStore
        >>> def write(writer):
        ...     writer.tensors("model.safetensors", {"weight": torch.ones(2)})
        ...     writer.state("trainer", {"epoch": 3})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     reader = Reader(CheckpointStore(folder).save(1200, write))
        ...     reader.weights(), reader.state("trainer")
        ({'weight': tensor([1., 1.])}, {'epoch': 3})
    """

    def __init__(self, path: Path, verify: bool = True, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = read_manifest(path) if manifest is None else manifest
        self._unverified = set(self.manifest.files) if verify else set()

    def has(self, name: str) -> bool:
        """Return True if the checkpoint has a file of that name."""
        return name in self.manifest.files

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Read the tensors of a safetensors file on the CPU. A tied tensor is under each of its names.

        Raises:
            CheckpointNotFoundError: the checkpoint has no such file.
            CorruptCheckpointError: the file has changed since it was written.
        """
        path = self._listed(name)

        def read() -> dict[str, Tensor]:
            # A file whose size differs from the manifest is an error, and need not be fetched.
            if name in self._unverified and files_of(path).size(path) != self.manifest.files[name].bytes:
                self._note_verified(name, file_problem(path, self.manifest.files[name]))
            with files_of(path).fetched(path, name in self._unverified) as (local, record):
                if record is not None:
                    self._note_verified(name, _difference(name, record, self.manifest.files[name]))
                return read_tensors(local)

        try:
            return patiently(read)
        except OSError as error:
            raise self._corrupt(_unreadable(name, error)) from error

    def json(self, name: str) -> Any:
        """Read the value of a JSON file; the errors are those of `tensors`."""
        path = self._listed(name)
        try:
            data = patiently(lambda: files_of(path).read(path, STATE_BYTES))
        except OSError as error:
            raise self._corrupt(_unreadable(name, error)) from error
        if name in self._unverified:
            hasher = Hasher()
            hasher.update(data)
            self._note_verified(name, _difference(name, hasher.record(), self.manifest.files[name]))
        try:
            return parse_json(data)
        except ValueError as error:
            raise self._corrupt(f"{name} is not JSON: {error}") from error

    def has_state(self, base: str) -> bool:
        """Return True if the checkpoint has a state that `Writer.state` wrote under the name `base`."""
        return bool(self.files_of(f"{base}.json"))

    def files_of(self, name: str) -> list[str]:
        """Return the names of the files for `name`: the file itself, or the part of each rank; [] if there are none."""
        return [file for file in sorted(self.manifest.files) if name in (file, whole_name(file))]

    def joined(self, name: str) -> dict[str, LazyTensor]:
        """Return the tensors of a safetensors file, by name; they are read only when needed.

        If each rank wrote a part of the file, the tensors of all parts are returned together.
        """
        return self._stored(self.files_of(name) or [name])

    def state(self, base: str, lazy: bool = False) -> Any:
        """Read a state that `Writer.state` wrote, and join the parts of ranks; the errors are those of `tensors`.

        Args:
            base: name of the file without "-<rank>-of-<ranks>" and ending, such as "optimizer".
            lazy: True: return tensors as `StoredTensor` objects, which are read only when needed.
        """
        tensors = f"{base}.safetensors"
        if self.has(f"{base}.json") and not lazy:
            return decode(self.json(f"{base}.json"), self.tensors(tensors) if self.has(tensors) else {})
        found = self.files_of(f"{base}.json") or [f"{base}.json"]
        beside = [name.removesuffix("json") + "safetensors" for name in found]
        tree = join_trees(
            decode(self.json(name), self._stored([file] if self.has(file) else []))
            for name, file in zip(found, beside, strict=True)
        )
        return tree if lazy else map_leaves(lambda leaf: leaf.read() if isinstance(leaf, LazyTensor) else leaf, tree)

    @property
    def weight_sets(self) -> tuple[str, ...]:
        """Sets of weights in the checkpoint: "live" (trained), "averaged"; the set in `model.safetensors` is first."""
        plain = self.manifest.info.get("weights")
        plain = plain if plain in WEIGHT_SETS else WEIGHT_SETS[0]
        return (plain, *(kind for kind in WEIGHT_SETS if kind != plain and self._files_of_set(kind)))

    def weights(self, which: str | None = None) -> dict[str, Tensor]:
        """Read all weights of the model: from `model.safetensors`, or from the parts of each rank.

        Args:
            which: set of weights: "live" (trained) or "averaged". None: the set in `model.safetensors`.

        Raises:
            CheckpointNotFoundError: the checkpoint has no weights, or not this set.
            CorruptCheckpointError: a file has changed since it was written.
        """
        whole = self.has("model.safetensors")
        plain = self.tensors("model.safetensors") if whole else read_all(self._stored(self._weight_files()))
        return plain | read_all(self._stored(self._other_files(which)))

    def stored_weights(self, which: str | None = None) -> Mapping[str, StoredTensor]:
        """Open the model's weights; each tensor is read from its file only when needed.

        Args:
            which: set of weights: "live" (trained) or "averaged". None: the set in `model.safetensors`.
        """
        return {**self._stored(self._weight_files()), **self._stored(self._other_files(which))}

    def _other_files(self, which: str | None) -> list[str]:
        """Return the names of the files to read after `model.safetensors`, in order to get a set of weights.

        These files contain the weights that differ from those in `model.safetensors`. [] if that file has the set.
        """
        kinds = self.weight_sets
        if which is not None:
            choice(*WEIGHT_SETS)("which_weights", which)
        if which is not None and which not in kinds:
            raise CheckpointNotFoundError(
                f"{self.path} has no {which} weights: it has {' and '.join(kinds)} ones. Both are in a full checkpoint "
                "of a run with WeightAveraging.",
                path=self.path,
            )
        return [] if which is None or which == kinds[0] else self._files_of_set(which)

    def _files_of_set(self, kind: str) -> list[str]:
        return sorted(name for name in self.manifest.files if whole_name(name) == f"{kind}.safetensors")

    def _weight_files(self) -> list[str]:
        files = sorted(name for name in self.manifest.files if name.endswith(".safetensors"))
        found = [name for name in files if name.startswith("model") and whole_name(name) != "model_extra.safetensors"]
        if not found:
            raise CheckpointNotFoundError(f"{self.path} holds no model*.safetensors", path=self.path)
        return found

    def _stored(self, names: Iterable[str]) -> dict[str, LazyTensor]:
        found = []
        for name in names:
            path = self._listed(name)
            if name in self._unverified:
                self._note_verified(name, file_problem(path, self.manifest.files[name]))
            found.append(read_parts(path))
        return join_tensors(found)

    def _listed(self, name: str) -> Path:
        if name not in self.manifest.files:
            raise CheckpointNotFoundError(
                f"{self.path} has no {name}; it has {', '.join(sorted(self.manifest.files)) or 'no files'}",
                path=self.path,
            )
        path = self.path / name
        refuse_link(path)
        return path if "/" not in name else inside(self.path, name, self.path / MANIFEST)

    def _note_verified(self, name: str, problem: str | None) -> None:
        if problem is not None:
            raise self._corrupt(problem)
        self._unverified.discard(name)

    def _corrupt(self, problem: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path} is damaged: {problem}. Use another checkpoint.", path=self.path)


def whole_name(name: str) -> str:
    """Return a file name without "-<rank>-of-<ranks>".

    Example:
        >>> whole_name("model-00000-of-00002.safetensors")
        'model.safetensors'
    """
    return re.sub(r"-\d{5}-of-\d{5}(?=\.[a-z]+$)", "", name)


def file_problem(path: Path, record: FileRecord) -> str | None:
    """Return what is wrong with a file of a checkpoint, as text; None if it has the size and checksums of `record`."""
    files = files_of(path)
    try:
        refuse_link(path)
        size = patiently(lambda: files.size(path))
        if size != record.bytes:  # a file of another size needs no checksum
            return f"{path.name} has {size:,} bytes instead of {record.bytes:,}"
        return _difference(path.name, patiently(lambda: files.hash(path)), record)
    except CorruptCheckpointError as error:
        return str(error)
    except OSError as error:
        return _unreadable(path.name, error)


def folder_problems(folder: Path) -> list[str]:
    """Return a list of what is wrong with a checkpoint; empty if it verifies. All its bytes are read."""
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
