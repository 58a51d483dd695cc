"""`Trainer(global_batch_size=N)`: the batch size per process and the accumulation that make N samples per step."""

from __future__ import annotations

from instep.errors import SettingError


def derive(global_batch_size: int, world_size: int, loader_batch_size: int) -> tuple[int, int]:
    """Split a global batch exactly over processes and micro-batches.

    Args:
        global_batch_size: samples per optimizer step, over all processes.
        world_size: processes that share the data.
        loader_batch_size: the loader's batch size: the most samples that one micro-batch may have.

    Returns:
        (samples per micro-batch and process, micro-batches per optimizer step): the fewest micro-batches that come out
        even.

    Raises:
        SettingError: the global batch does not divide over the processes.

    Example:
        >>> derive(256, world_size=4, loader_batch_size=32)
        (32, 2)
    """
    per_rank, rest = divmod(global_batch_size, world_size)
    if rest:
        usable = [size * world_size for size in (per_rank, per_rank + 1) if size]
        raise SettingError(
            f"global_batch_size={global_batch_size} does not divide over {world_size} processes. "
            f"Nearest: {' or '.join(map(str, usable))}.",
            field="global_batch_size",
            got=global_batch_size,
        )
    fewest = -(-per_rank // loader_batch_size)
    accumulate = next(count for count in range(fewest, per_rank + 1) if per_rank % count == 0)
    return per_rank // accumulate, accumulate
