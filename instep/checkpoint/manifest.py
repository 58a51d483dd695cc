"""`Manifest`: the file `manifest.json` of a checkpoint, with the size and checksums of every other file.

The manifest is written last: a folder without it is not a checkpoint. The file is one JSON object, whose last entry is
the checksum of all bytes before it, so that a flipped bit in the manifest itself is found too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from instep.checkpoint.codec import decode, encode
from instep.checkpoint.edge import check, count, dict_of, list_of, named, none_or, number, reading, text
from instep.checkpoint.files import patiently
from instep.checkpoint.hashing import FileRecord, digest
from instep.checkpoint.lineage import PLACES
from instep.checkpoint.names import MANIFEST, is_inner_name
from instep.checkpoint.remote import files_of
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UnsavableStateError
from instep.utils.untrusted_files import INDEX_BYTES, parse_object

FORMAT_VERSION = 1
_BODY = {
    **dict.fromkeys(("step", "attempt", "world_size"), count),
    **dict.fromkeys(("run_id", "created"), text),
    **dict.fromkeys(("info", "files"), named),
    "versions": dict_of(text),
}
_LINE = {"serial": count, "resumed_from": PLACES}  # these fields are optional, since the oldest manifests lack them
_INFO = {
    "kind": text,
    "epoch": none_or(count),
    "monitor": none_or(text),
    "mode": none_or(text),
    "score": none_or(number),
}
_END = "\n}\n"
_SEAL = ',\n "xxh3": "'


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's manifest.

    Args:
        step: global step of the save.
        attempt: number of this save among the saves of the same step, from 1.
        run_id: id of the run that saved the checkpoint.
        world_size: number of ranks that saved the checkpoint.
        created: UTC time of the save in ISO 8601, for people; no decision depends on it.
        versions: versions of instep, torch and Python.
        files: size and checksums of each file, by name.
        info: further JSON values, such as kind ("full" or "weights"), epoch, monitor, mode and score.
        serial: serial number of the save, higher than that of every earlier save in its folder and in its run; 0 if an
            early version of instep wrote the checkpoint.
        resumed_from: pairs of run id and step: the checkpoint from which the run was resumed, then earlier ones; see
            `lineage.Line`.
        format_version: version of the checkpoint format.
    """

    step: int
    attempt: int
    run_id: str
    world_size: int
    created: str
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    info: Mapping[str, Any] = field(default_factory=dict)
    serial: int = 0
    resumed_from: tuple[tuple[str, int], ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: the checkpoint that was saved last has the highest key."""
        return self.serial, self.step, self.attempt

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json.

        Raises:
            UnsavableStateError: `info` contains values that are not JSON.
        """
        info, tensors = encode(dict(self.info), "the checkpoint's info")
        if tensors:
            raise UnsavableStateError(
                f"the checkpoint's info holds a tensor at {next(iter(tensors))!r}; give numbers, such as .item()"
            )
        body = {
            "format_version": self.format_version,
            "step": self.step,
            "attempt": self.attempt,
            "serial": self.serial,
            "run_id": self.run_id,
            "resumed_from": self.resumed_from,
            "world_size": self.world_size,
            "created": self.created,
            "versions": dict(self.versions),
            "info": info,
            "files": {name: _record_out(record) for name, record in sorted(self.files.items())},
        }
        content = json.dumps(body, indent=1, allow_nan=False).removesuffix("\n}")
        return f'{content}{_SEAL}{digest(content.encode())}"{_END}'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Manifest:
        """Parse the content of manifest.json, and check it.

        Args:
            data: content of the file.
            path: path of the file, for error messages.

        Raises:
            CorruptCheckpointError: the content is damaged.
            CheckpointError: a newer version of instep wrote the file.
        """
        content, seal, rest = data.rpartition(_SEAL.encode())
        if not seal or rest != f'{digest(content)}"{_END}'.encode():
            raise CorruptCheckpointError(f"{path} is cut short or damaged: its checksum differs", path=path)
        with reading(path, "is not a manifest"):
            body = parse_object(content + b"\n}")
            check(body, {"format_version": count}, "it")
            if body["format_version"] > FORMAT_VERSION:
                raise CheckpointError(
                    f"{path} has format version {body['format_version']}; this instep reads up to {FORMAT_VERSION}. "
                    "Upgrade instep to read it.",
                    path=path,
                )
            check(body, _BODY, "it", _LINE)
            body["resumed_from"] = tuple((run, step) for run, step in body.get("resumed_from", ()))
            body["info"] = decode(body["info"], {})
            check(body["info"], {}, "its info", _INFO)
            outside = [name for name in body["files"] if not is_inner_name(name)]
            if outside:
                raise ValueError(f"the file name {outside[0][:200]!r} leads out of the folder")
            body["files"] = {name: _record_in(record, name) for name, record in body["files"].items()}
            # Ignore unknown fields, which a later version of instep may have added.
            known = {one.name for one in fields(cls)}
            return cls(**{key: value for key, value in body.items() if key in known})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder.

    Raises:
        CheckpointNotFoundError: the folder has no manifest, so it is not a complete checkpoint.
        CorruptCheckpointError: the manifest is damaged.
    """
    path = folder / MANIFEST
    refuse_link(path)
    try:
        data = patiently(lambda: files_of(path).read(path, INDEX_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(
            f"{folder} is not a checkpoint: it has no {MANIFEST}, which a save writes last", path=folder
        ) from error
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}", path=path) from error
    return Manifest.from_bytes(data, path)


def _record_out(record: FileRecord) -> dict[str, Any]:
    out: dict[str, Any] = {"bytes": record.bytes, "xxh3": record.xxh3}
    if record.chunks:
        out["chunks"] = list(record.chunks)
    return out


def _record_in(record: Any, name: str) -> FileRecord:
    check(record, {"bytes": count, "xxh3": text}, name, {"chunks": list_of(text)})
    return FileRecord(record["bytes"], record["xxh3"], tuple(record.get("chunks", ())))


def refuse_link(path: Path) -> None:
    """Raise an error if a file of a checkpoint is a symbolic link, since a save never writes one.

    Raises:
        CorruptCheckpointError: the path is a symbolic link.
    """
    if isinstance(path, Path) and path.is_symlink():
        raise CorruptCheckpointError(
            f"{path} is a symbolic link, and a checkpoint has none. Where it comes from a cache that keeps files "
            "elsewhere, copy the folder with what it links to: cp -rL.",
            path=path,
        )
