"""Read files of torch.save, after a check that the sizes in them are consistent.

`torch.load(weights_only=True)` runs no code from a file, but it trusts the numbers in the file: if a storage is longer
than its record in the zip file, torch reads the memory behind the record. So the sizes of storages and records are
compared first. This is possible because torch stores records uncompressed, and each storage in its own record.
"""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from instep.checkpoint.edge import reading
from instep.checkpoint.foreign.pickles import Record, read_pickle, records_in
from instep.checkpoint.remote import files_of
from instep.errors import CheckpointError
from instep.utils.untrusted_files import open_regular

_SMALL_BYTES = 2**16  # largest size of small records, such as the version and the byte order
_PICKLE_BYTES = 2**29  # largest size of the pickle, which does not contain the values of tensors
_ITEM_BYTES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Half", "Short", "BFloat16"), 2),
    **dict.fromkeys(("Char", "Byte", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4", "Untyped"), 1),
    "ComplexDouble": 16,
}
_MODULES = ("torch", "torch.storage", "torch.cuda")
_WITH_ATTRIBUTES = ("torch._tensor._rebuild_from_type_v2", "torch._utils._rebuild_parameter_with_state")
_MAKES_TENSORS = ("torch", "torch._tensor", "torch._utils", "torch.cuda", "torch.nn.parameter", "torch.sparse")
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_END = struct.Struct("<4s4H2LH")  # end record of a zip file, with the position of its directory
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save on the CPU; refuse a file that needs to run code.

    Args:
        path: file that one call of `torch.save` wrote.

    Raises:
        CheckpointError: the file cannot be read, or only by running code.
        CorruptCheckpointError: the file is damaged, or the sizes in it are inconsistent.
    """
    with (
        reading(path, "is not a whole file of torch.save"),
        files_of(path).fetched(path, False) as (local, _),
        open_regular(local) as raw,
        io.BufferedReader(raw) as file,
    ):
        return load_torch(file, path)


def load_torch(file: BinaryIO, path: Path) -> Any:
    """Read an open file of torch.save. A damaged file may cause errors of any type.

    Args:
        file: open file, positioned at its beginning.
        path: path of the file, for messages.

    Raises:
        CheckpointError: the file cannot be read without running code.
    """
    try:
        _check(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} cannot be read without running code that it names: {str(error).splitlines()[0]} "
            "Save its state dict alone where it was made: torch.save(model.state_dict(), path).",
            path=path,
        ) from error


def _check(file: BinaryIO) -> None:
    """Raise ValueError if the sizes in a file of torch.save are inconsistent."""
    size = file.seek(0, 2)
    file.seek(0)
    zipped = file.read(4) == b"PK\x03\x04"  # torch.load recognizes a zip file by the same bytes
    file.seek(0)
    if zipped:
        _check_zip(file, size)
    else:
        _check_legacy(file, size)


def _check_zip(file: BinaryIO, size: int) -> None:
    _check_directory(file, size)
    with zipfile.ZipFile(file) as archive:
        records = {entry.filename: entry for entry in archive.infolist()}
        if len({name.casefold() for name in records}) != len(archive.infolist()):
            raise ValueError("two records have one name")
        total = sum(entry.file_size for entry in records.values())
        if total > size or any(
            entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1
            for entry in records.values()
        ):
            raise ValueError("its records are compressed, or larger than the file; torch.save stores them as they are")
        pickles = [name for name in records if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or records[pickles[0]].file_size > _PICKLE_BYTES:
            raise ValueError(f"{len(pickles)} records data.pkl, or one that is too large")
        folder = pickles[0].removesuffix("data.pkl")
        small = (name for name in records if name != pickles[0] and not name.startswith(f"{folder}data/"))
        # torch reads all records that are not storages into memory as a whole.
        if any(records[name].file_size > _SMALL_BYTES for name in small):
            raise ValueError("a record that is no storage is too large")
        stored = {name.removeprefix(f"{folder}data/"): entry.file_size for name, entry in records.items()}
        _check_value(read_pickle(archive.read(pickles[0])), stored)


def _check_directory(file: BinaryIO, size: int) -> None:
    """Raise an error for a zip file in which torch and Python's zipfile would find different directories.

    torch reads the directory at the position that the end record gives; zipfile expects it right before the end record.
    """
    file.seek(max(size - _END.size - _LOCATOR_64.size - _END_64.size, 0))
    tail = file.read()
    end = _END.unpack(tail[-_END.size :])
    at, length = end[6], end[5]
    begin = size - _END.size
    locator = tail[-_END.size - _LOCATOR_64.size : -_END.size]
    if locator.startswith(b"PK\x06\x07"):
        begin -= _LOCATOR_64.size + _END_64.size
        _, _, there, _ = _LOCATOR_64.unpack(locator)
        end_64 = _END_64.unpack(tail[: _END_64.size])
        if there != begin or end_64[0] != b"PK\x06\x06":
            raise ValueError("its directory is not where it must be")
        length, at = end_64[8], end_64[9]
    if end[0] != b"PK\x05\x06" or end[7] != 0 or at + length != begin:
        raise ValueError("its directory is not where it must be")


def _check_legacy(file: BinaryIO, size: int) -> None:
    """Check the sizes in a file of torch's format before 1.6: five pickles, followed by the storages."""
    head = file.read(tarfile.BLOCKSIZE)
    file.seek(0)
    if head and _is_tar(head):
        raise ValueError("it is a tar file, which torch wrote before 0.1.10")
    if read_pickle(file) != _LEGACY_MAGIC:
        raise pickle.UnpicklingError("it is a plain pickle, which torch.save did not write.")
    _protocol, _about, value, keys = (read_pickle(file) for _ in range(4))
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise ValueError("its list of storages is none")
    stored = _check_value(value, None)
    if sum(stored.values()) > size or not stored.keys() <= set(keys):
        raise ValueError("its storages are larger than the file, or are not there")


def _is_tar(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        return False
    return True


def _check_value(value: Any, stored: Mapping[str, int] | None) -> dict[str, int]:
    """Check the storages and tensors in the pickle of a file of torch.save.

    Args:
        value: content of the pickle, as `read_pickle` returns it.
        stored: size in bytes of each storage's record; None if only the pickle contains the sizes.

    Returns:
        Size in bytes of each storage that the pickle uses.
    """
    used: dict[str, int] = {}
    for record in records_in(value):
        if record.name == "":
            key, nbytes = _storage(record.args)
            if stored is not None and stored.get(key) != nbytes:
                raise ValueError(f"the storage {key} has {nbytes:,} bytes, and its record {stored.get(key, 0):,}")
            used[key] = max(nbytes, used.get(key, 0))
        elif record.args is not None:
            _check_state(record.name, record.state)
            _check_call(record.name, record.args)
    return used


def _storage(pid: Any) -> tuple[str, int]:
    if type(pid) is not tuple or len(pid) < 5 or pid[0] not in ("storage", b"storage"):
        raise ValueError("a persistent id that names no storage")
    kind, key, numel = pid[1], pid[2], pid[4]
    return str(key), _count(numel) * _item_bytes(kind)


def _item_bytes(kind: Any) -> int:
    module, _, name = kind.name.rpartition(".") if type(kind) is Record else ("", "", "")
    size = _ITEM_BYTES.get(name.removesuffix("Storage")) if name.endswith("Storage") else None
    if size is None or module not in _MODULES:
        raise ValueError(f"{module}.{name} is no kind of storage")
    return size


def _check_call(name: str, args: Any) -> None:
    """Raise an error if a call in the pickle would make something other than a tensor of the file's storages."""
    module, _, function = name.rpartition(".")
    if name in _WITH_ATTRIBUTES:
        _check_attributes(args[3] if len(args) > 3 else None)
    inner = args[0] if function == "_rebuild_from_type_v2" else None
    if inner is not None and (type(inner) is not Record or not inner.name.startswith("torch._utils._rebuild_")):
        raise ValueError("a tensor of a kind that is not known")
    makes_memory = function.endswith(("Tensor", "Storage")) and module.startswith("torch")
    if args and (makes_memory or (function == "bytearray" and type(args[0]) not in (str, bytes, Record))):
        raise ValueError(f"a call of {name} with a size")
    if function == "encode" and args[1:] != ("latin1",):
        raise ValueError(f"a call of {name} for another encoding than latin1")


def _check_state(name: str, state: Any) -> None:
    """Raise an error for attributes in a pickle that would replace methods of the objects that torch makes."""
    if state is None:
        return
    if name == "collections.OrderedDict" and type(state) is dict and state.keys() <= {"_metadata"}:
        return
    if name == "collections.OrderedDict" or name.rpartition(".")[0] in _MAKES_TENSORS:
        raise ValueError(f"attributes of what {name} makes")


def _check_attributes(state: Any) -> None:
    for part in state if type(state) is tuple else (state,):
        if part is not None and (type(part) is not dict or any(hasattr(torch.nn.Parameter, str(key)) for key in part)):
            raise ValueError("attributes of a tensor that stand before its own")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a {type(value).__name__} that is no number of elements")
    return value
