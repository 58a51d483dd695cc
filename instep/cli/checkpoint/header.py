"""What tensors a safetensors file has, by its header alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep.checkpoint.stored import read_parts


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file.

    Args:
        path: the file.

    Returns:
        Name -> shape, dtype (torch's name), bytes, `same_as` for one that is stored under another name, and `part_of`,
        the whole shape, for a part of a tensor.

    Raises:
        CorruptCheckpointError: it is not a whole safetensors file.
    """
    return {
        name: {
            "shape": list(part.sizes),
            "dtype": part.dtype,
            "bytes": part.end - part.begin,
            **({"same_as": part.name} if name != part.name else {}),
            **({"part_of": list(part.shape)} if part.sizes != part.shape else {}),
        }
        for name, part in sorted(read_parts(path).items())
    }
