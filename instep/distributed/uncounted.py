"""`doubt_of_size`: says why the samples of a batch may be miscounted, for example in a list of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from instep.distributed.nested import find_batch_size, iter_leaves


def doubt_of_size(data: Any, batch_size: int | None = None) -> str:
    """Return why `find_batch_size` may miscount a batch, and what follows from it; "" if its count is right.

    Args:
        data: the batch.
        batch_size: the loader's attribute `batch_size`.

    Example:
        >>> doubt_of_size([{"x": torch.ones(3)}, {"x": torch.ones(3)}])
        'a list of 2 dicts may have one for each sample, and is taken for 3 by its first tensor'
        >>> doubt_of_size([torch.ones(4, 2), torch.ones(4)])
        ''
    """
    if isinstance(data, (torch.Tensor, Number, str, bytes, type(None))):
        return ""
    if not any(isinstance(leaf, torch.Tensor) and leaf.ndim for _, leaf in iter_leaves(data)):
        return f"a {type(data).__name__} has no tensor that begins with the sample, so that batches weigh alike"
    size = find_batch_size(data)
    found = _list_of_samples(data, batch_size if batch_size != size else None)
    if found is None:
        return ""
    of = f"a {type(found).__name__} of {len(found)} {type(found[0]).__name__}s"
    return f"{of} may have one for each sample, and is taken for {size} by its first tensor"


def _list_of_samples(data: Any, length: int | None) -> Sequence[Any] | None:
    """Return a list that may have one entry per sample; None if there is no such list.

    Such a list has dicts, entries whose tensors have different lengths, or `length` entries.
    """
    if isinstance(data, Mapping):
        parts: Iterable[Any] = data.values()
    elif isinstance(data, (list, tuple)) and data:
        kinds = (torch.Tensor, Mapping, list, tuple)
        alike = next((kind for kind in kinds if all(isinstance(one, kind) for one in data)), None)
        begins = {len(leaf) if leaf.ndim else None for _, leaf in iter_leaves(data) if isinstance(leaf, torch.Tensor)}
        if alike is torch.Tensor:
            begins.discard(None)  # 0-dim tensors beside columns do not make the number of samples doubtful
        if alike and len(data) > 1 and (alike is Mapping or len(begins) > 1 or 2 < len(data) == length):
            return data
        parts = data
    else:
        return None
    return next((found for part in parts if (found := _list_of_samples(part, length)) is not None), None)
