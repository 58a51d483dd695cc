"""Hashes of samples, by which ranks compare whether they hold the same samples."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from instep.distributed.nested import iter_leaves
from instep.distributed.replicas import digest
from instep.state.rank_records import digest_of


def mark_of(batch: Any) -> int:
    """Hash a batch to a number above 0; return 0 if it has no values, or a value that cannot be compared."""
    parts: list[str] = []
    for _, leaf in iter_leaves(batch):
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and not (leaf.is_complex() or leaf.is_quantized):
            parts.append(f"{leaf.dtype} {tuple(leaf.shape)} {digest(leaf)}")
        elif type(leaf).__module__ == "numpy" and leaf.dtype != object:
            parts.append(f"{leaf.dtype} {leaf.shape} {digest_of(leaf.tobytes().hex())}")  # pyright: ignore
        elif leaf is None or isinstance(leaf, (str, bytes, int, float)):
            parts.append(repr(leaf))
        else:
            return 0
    return digest_of("\n".join(parts)) % (2**63 - 1) + 1 if parts else 0


def marks_of_ends(dataset: Any) -> tuple[int, ...]:
    """Hash the first and last sample of data that can be read without its transforms; return () for other data."""
    if hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format"):
        dataset = dataset.with_format(None)  # transforms of Hugging Face data sets may be random
    elif type(dataset) not in (list, tuple, TensorDataset, torch.Tensor):
        return ()
    return tuple(mark_of(dataset[place]) for place in (0, len(dataset) - 1)) if len(dataset) else ()
