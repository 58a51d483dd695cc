"""What tensors a safetensors file has, by its header alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from instep.checkpoint.tensors import ALIASES, DTYPES
from instep.errors import CheckpointError, CorruptCheckpointError

_LONGEST = 100 * 10**6  # bytes of a header, as the safetensors library allows
_NAMES = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint", "C": "complex"}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file.

    Args:
        path: the file.

    Returns:
        Name -> shape, dtype (torch's name), bytes, and `same_as` for one that is stored under another name.

    Raises:
        CorruptCheckpointError: it is not a whole safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        notes = header.pop("__metadata__", {})
        kinds, aliases = json.loads(notes.get(DTYPES, "{}")), json.loads(notes.get(ALIASES, "{}"))
        found = {name: _tensor(entry, kinds.get(name)) for name, entry in header.items()}
        found.update({alias: {**found[name], "same_as": name} for alias, name in aliases.items()})
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}", path=path) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is not a safetensors file: {error!r}", path=path) from error
    return dict(sorted(found.items()))


def _tensor(entry: dict[str, Any], raw: str | None) -> dict[str, Any]:
    begin, end = entry["data_offsets"]
    shape = [int(length) for length in entry["shape"]]
    dtype = _dtype(entry["dtype"])
    if raw is not None:  # stored as bytes, one more dimension of them
        shape, dtype = shape[:-1], raw
    return {"shape": shape, "dtype": dtype, "bytes": int(end) - int(begin)}


def _dtype(code: str) -> str:
    letters = code.rstrip("0123456789")
    return "bool" if code == "BOOL" else f"{_NAMES[letters]}{code[len(letters) :]}" if letters in _NAMES else code
