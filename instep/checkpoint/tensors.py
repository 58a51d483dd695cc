"""Write and read tensors as a safetensors file.

instep writes the file with its own code, so that it can compute checksums meanwhile. The safetensors library reads it.
Three entries of the file's metadata are instep's, each with a JSON object:
`instep.aliases` (further name of a tied tensor -> name under which it is stored), `instep.dtypes` (name -> torch dtype
of a tensor that is stored as raw bytes, because the format does not have the dtype) and `instep.shards` (name ->
`shape` of the whole tensor of which the file has a part, and `flat` if the part is a range of elements). The position
of each part is in torch's own entry, so that torch.distributed.checkpoint can read rectangular parts too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from instep.checkpoint.edge import reading
from instep.checkpoint.files import Files, patiently
from instep.checkpoint.hashing import Data, FileRecord
from instep.checkpoint.remote import files_of
from instep.errors import UnsavableStateError
from instep.utils.untrusted_files import parse_object

ALIASES = "instep.aliases"
DTYPES = "instep.dtypes"
SHARDS = "instep.shards"
OFFSETS = "DCP_SHARDING_INFO"  # key that torch.distributed.checkpoint's HuggingFaceStorageWriter writes
_RESERVED = "__metadata__"

# Dtypes are given by name, since older versions of torch do not have all of them.
FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_SUMMED_ELEMENTS = 2**22  # number of elements that are summed at a time
# odd factors by which `content_sum` mixes the bits of each element
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_RAW_NAMES = {"complex128", "complex32", "float4_e2m1fn_x2"}


@dataclass(frozen=True)
class Shard:
    """A part of a tensor that this rank holds: a rectangular box, or a range of elements of the flattened tensor.

    A state may contain a Shard in place of a tensor. Each rank's writer stores its part, and a reader of the checkpoint
    gets the whole tensor, whichever ranks wrote its parts.

    Args:
        local: the part, as a plain tensor on any device.
        shape: shape of the whole tensor.
        offsets: index of the box's first element in each dimension of `shape`. With `flat`, one number: the index of
            the first element in the flattened tensor.
        flat: whether `local` is a 1-dim range of elements of the flattened tensor.

    Example:
        >>> Shard(torch.ones(2, 3), shape=(4, 3), offsets=(2, 0)).offsets
        (2, 0)
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    flat: bool = False

    def __post_init__(self) -> None:
        here, begin = tuple(self.local.shape), self.offsets
        total = (math.prod(self.shape),) if self.flat else tuple(self.shape)
        if not len(here) == len(begin) == len(total) or any(
            at < 0 or at + size > end for at, size, end in zip(begin, here, total, strict=True)
        ):
            raise ValueError(f"a part of shape {here} at {begin} does not lie within a tensor of shape {self.shape}")

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Shape of the whole tensor, offsets of the part in it, and whether the part is flat."""
        return tuple(self.shape), tuple(self.offsets), self.flat


class StoredTensor(Protocol):
    """A tensor in a checkpoint, perhaps in parts in several files, which is read only when `read` is called."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype in the file."""
        ...

    def read(self, box: tuple[slice, ...] | None = None) -> Tensor:
        """Read the tensor, or a rectangular box of it, into new CPU memory. Only the bytes of the box are read.

        Args:
            box: a slice with start and stop for each dimension. None: the whole tensor.
        """
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype with this name; raise ValueError if this version of torch does not have it."""
    dtype = vars(torch).get(name)  # getattr is not used, since it could import a submodule of torch with this name
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype


def content_sum(part: Tensor | Shard) -> int:
    """Return a 64-bit checksum of a tensor's values that does not depend on how the tensor is split into parts.

    Each element adds a number that depends on its bits and on its index in the whole tensor. So the checksums of a
    tensor's parts add up to the checksum of the whole tensor, modulo 2**64.

    Args:
        part: a whole tensor, or a Shard, on any device.

    Example:
        >>> whole = torch.arange(12.0).view(4, 3)
        >>> cut = [Shard(whole[:1], (4, 3), (0, 0)), Shard(whole.flatten()[3:].clone(), (4, 3), (3,), flat=True)]
        >>> (content_sum(cut[0]) + content_sum(cut[1])) % 2**64 == content_sum(whole)
        True
    """
    local = part.local if isinstance(part, Shard) else part
    local = local.detach().as_subclass(Tensor)
    whole, offsets = tuple(local.shape), (0,) * local.ndim
    if isinstance(part, Shard):
        whole, offsets = ((math.prod(part.shape),) if part.flat else tuple(part.shape)), tuple(part.offsets)
    if local.is_complex():
        local, whole, offsets = torch.view_as_real(local), (*whole, 2), (*offsets, 0)
    if not local.ndim:
        local, whole, offsets = local[None], (1,), (0,)
    if not local.numel():
        return 0
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    rows = max(1, _SUMMED_ELEMENTS * len(local) // local.numel())
    total = 0
    for begin in range(0, len(local), rows):
        piece = local[begin : begin + rows].contiguous().view(bits).to(torch.int64)
        place = torch.zeros((), dtype=torch.int64, device=piece.device)
        for dim, (size, at) in enumerate(zip(piece.shape, (offsets[0] + begin, *offsets[1:]), strict=True)):
            places = torch.arange(at, at + size, device=piece.device) * math.prod(whole[dim + 1 :])
            place = place + places.view(-1, *[1] * (piece.ndim - dim - 1))
        mixed = piece * _FACTORS[0] + (place + 1) * _FACTORS[1]  # overflow at 64 bits is intended
        mixed = (mixed ^ (mixed >> 29)) * _FACTORS[2]
        total += int((mixed ^ (mixed >> 32)).sum())
    return total % 2**64


def why_unsavable(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be saved, and what to do instead, as text; None if it can be saved."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"a tensor subclass, {type(tensor).__name__}; save the plain tensors it is made of"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}; save its indices and values"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values; give it values first"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}); save int_repr() with its scale and zero point"
    if dtype_name(tensor.dtype) not in FORMAT_NAMES.keys() | _RAW_NAMES:
        return f"a tensor of dtype {tensor.dtype}; save it as view(torch.uint8)"
    return None


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor | Shard],
    metadata: Mapping[str, str] | None = None,
    *,
    files: Files | None = None,
) -> FileRecord:
    """Write a safetensors file, and wait until it is on the disk.

    Tensors are copied to the host one at a time. A tensor with several names (tied weights) is stored once, under its
    first name. Tensors whose memory overlaps only in part are stored separately, each of them completely.

    Args:
        path: path of the file, which must not exist.
        tensors: by name, a tensor of any shape and strides on any device, or a Shard.
        metadata: strings to store in the file's header.
        files: file operations. None: those of the local disk.

    Returns:
        Size and checksums of the file.

    Raises:
        UnsavableStateError: a tensor has no values (meta device) or no plain layout, or a name is not allowed.
        CheckpointError: the file could not be written; the message has the path and the bytes written so far.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_tensors(Path(folder, "x.safetensors"), {"a": torch.ones(2)}).bytes
        104

    Source: the description of the format in the README of safetensors.
    """
    head, stored = framing(tensors, metadata)
    with (files or files_of(path)).create(path, len(head) + sum(tensor.nbytes for tensor in stored.values())) as out:
        out.write(head)
        for tensor in stored.values():
            out.write(content_of(tensor))
        return out.close()


def framing(
    tensors: Mapping[str, Tensor | Shard], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Tensor]]:
    """Make the header of a safetensors file, and sort the tensors.

    Args:
        tensors: as in `write_tensors`; a tied tensor is stored once.
        metadata: strings to store in the header.

    Returns:
        The bytes of the header, and the tensors in the order in which their contents follow it without gaps.

    Raises:
        UnsavableStateError: a tensor has no values (meta device) or no plain layout, or a name is not allowed.
    """
    stored, aliases = _split_shared(tensors)
    # Tensors with larger elements come first, so that every tensor is aligned to its element size.
    order = sorted(stored, key=lambda name: (-stored[name].element_size(), name))
    raw = {name: dtype_name(tensor.dtype) for name, tensor in stored.items() if _is_raw(tensor)}
    notes = {"format": "pt", **(metadata or {})}
    if aliases:
        notes[ALIASES] = json.dumps(aliases)
    if raw:
        notes[DTYPES] = json.dumps(raw)
    shards = {name: part for name in stored if isinstance(part := tensors[name], Shard)}
    if shards:
        offsets = {
            name: shards[name].offsets if name in shards else (0,) * tensor.ndim for name, tensor in stored.items()
        }
        wide = {name: {"saved_offsets": [*begin, *[0] * (name in raw)]} for name, begin in offsets.items()}
        notes[OFFSETS] = json.dumps(wide)
        notes[SHARDS] = json.dumps({name: _about(part) for name, part in shards.items()})
    header: dict[str, object] = {_RESERVED: notes}
    end = 0
    for name in order:
        tensor = stored[name]
        begin, end = end, end + tensor.nbytes
        if name in raw:
            dtype, shape = "U8", [*tensor.shape, tensor.element_size()]
        else:
            dtype, shape = FORMAT_NAMES[dtype_name(tensor.dtype)], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: stored[name] for name in order}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file on the CPU.

    All names of a tied tensor get the same tensor object. The tensors are copies in memory, unlike those of the
    safetensors library, which maps the file: if a mapped file is truncated later, reading it kills the process.

    Args:
        path: path of the file.

    Returns:
        The tensors by name.

    Raises:
        CorruptCheckpointError: the file is not a complete safetensors file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "x.safetensors")
        ...     record = write_tensors(file, {"a": torch.ones(2)})
        ...     read_tensors(file)
        {'a': tensor([1., 1.])}
    """
    tensors, metadata = _read_stored(path)
    with reading(path, "has metadata that does not fit its tensors"):
        for name, dtype in parse_object(metadata.get(DTYPES, "{}")).items():
            raw = tensors[name]
            flat = raw.reshape(-1).view(dtype_from_name(dtype))
            tensors[name] = flat.reshape(raw.shape[:-1])
        for alias, name in parse_object(metadata.get(ALIASES, "{}")).items():
            tensors[alias] = tensors[name]
    return tensors


def _read_stored(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open  # imported late: only needed for reading

    def read() -> tuple[dict[str, Tensor], dict[str, str]]:
        with files_of(path).fetched(path, False) as (local, _), safe_open(local, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118

    with reading(path, "is not a whole safetensors file"):
        return patiently(read)


def _about(part: Shard) -> dict[str, object]:
    return {"shape": list(part.shape), **({"flat": True} if part.flat else {})}


def _is_raw(tensor: Tensor) -> bool:
    return dtype_name(tensor.dtype) in _RAW_NAMES


def _split_shared(tensors: Mapping[str, Tensor | Shard]) -> tuple[dict[str, Tensor], dict[str, str]]:
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in tensors.items():
        tensor, place = (value.local, value.place) if isinstance(value, Shard) else (value, None)
        if name == _RESERVED:
            raise UnsavableStateError(f"a tensor cannot be named {name!r}: the safetensors format keeps it for itself")
        problem = why_unsavable(tensor)
        if problem is not None:
            raise UnsavableStateError(f"{name} is {problem}")
        view = tensor.detach()
        if view.numel() == 0:  # an empty tensor shares no memory with others
            stored[name] = view
            continue
        where = view.data_ptr() or id(tensor)  # the id is used on devices where a tensor has no address
        same = (view.device, where, view.dtype, view.shape, view.stride(), view.is_conj(), view.is_neg(), place)
        owner = first.setdefault(same, name)
        if owner == name:
            stored[name] = view
        else:
            aliases[name] = owner
    return stored, aliases


def content_of(tensor: Tensor) -> Data:
    """Return the bytes of a tensor in the order in which a file stores them."""
    if tensor.numel() == 0:
        return b""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    # as_strided is used because reshape(-1) keeps the stride of a tensor with one element, and view() may refuse it.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
