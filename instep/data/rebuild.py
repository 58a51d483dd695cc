"""A plain `DataLoader` once more, with other indices and the same options."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

_KEPT = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def rebuild(loader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, **changes: Any) -> DataLoader[Any]:
    """A new loader with the options of another.

    Args:
        loader: a plain `DataLoader`, not of a subclass.
        kind: the class of the new loader: `DataLoader`, or one that takes the same options.
        **changes: options to set otherwise; those that make batches (`batch_size`, `sampler`, `batch_sampler`,
            `drop_last`) are not kept and must be given.
    """
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return kind(**{**options, **changes})
