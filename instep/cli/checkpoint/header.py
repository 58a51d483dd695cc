"""What tensors safetensors files have, by their headers alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instep.checkpoint.stored import join_tensors, read_parts


def read_headers(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file, or of several that hold parts of them.

    Args:
        paths: the files.

    Returns:
        Name -> shape, dtype (torch's name), bytes, `same_as` for one that is stored under another name, and `parts`,
        how many, where it is not in one piece.

    Raises:
        CorruptCheckpointError: one is not a whole safetensors file.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in sorted(join_tensors(map(read_parts, paths)).items()):
        parts = tensor.parts
        found[name] = {
            "shape": list(parts[0].shape),
            "dtype": parts[0].dtype,
            "bytes": sum(part.end - part.begin for part in parts),
            **({"same_as": parts[0].name} if name != parts[0].name else {}),
            **({"parts": len(parts)} if len(parts) > 1 else {}),
        }
    return found
