"""Settings of data: `limit_train_batches` and its like, and how the Accelerator prepares loaders."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from instep.errors import SettingError


def resolve_limit(limit: int | float | None, num_batches: int | None, name: str) -> int | float:
    """Return the number of batches that a limit leaves.

    Args:
        limit: an int counts batches, a float is a fraction of them; None and 1.0 take all.
        num_batches: batches there are on this rank, None when unknown.
        name: the setting's name, for the error.

    Returns:
        The number of batches, `math.inf` when neither the limit nor the data has an end.

    Raises:
        SettingError: the limit is negative, a fraction above 1, a fraction of an unknown number, or a fraction too
            small for one batch.

    Example:
        >>> resolve_limit(0.5, 9, "limit_train_batches"), resolve_limit(20, 9, "limit_train_batches")
        (4, 9)
    """
    if limit is None:
        limit = 1.0
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise SettingError(f"{name}={limit!r} must be an int (batches) or a float (fraction)", field=name, got=limit)
    if limit < 0 or (isinstance(limit, float) and not limit <= 1.0):
        raise SettingError(
            f"{name}={limit!r} is out of range: give an int of at least 0 (batches) or a float from 0.0 to 1.0",
            field=name,
            got=limit,
        )
    if isinstance(limit, int):
        return limit if num_batches is None else min(limit, num_batches)
    if limit == 0.0:
        return 0
    if num_batches is None:
        if limit == 1.0:
            return math.inf
        raise SettingError(
            f"{name}={limit!r} is a fraction, but the loader has no length to take a fraction of. Give 1.0 or an int",
            field=name,
            got=limit,
        )
    batches = int(num_batches * limit)
    if batches == 0 and num_batches > 0:
        raise SettingError(
            f"{name}={limit!r} of {num_batches} batches is less than one batch. Give at least "
            f"{_smallest(num_batches)}, or an int",
            field=name,
            got=limit,
        )
    return batches


def _smallest(num_batches: int) -> float:
    """Return the smallest fraction that gives one batch, rounded up to few digits."""
    for digits in range(1, 17):
        fraction = math.ceil(10**digits / num_batches) / 10**digits
        if fraction <= 1.0 and fraction * num_batches < 1.1:
            return fraction
    return 1 / num_batches


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """Settings by which `Accelerator.prepare` spreads loaders over the ranks.

    Args:
        split_batches: the loader's batch size is that of all ranks together, not that of each.
        dispatch_batches: True: rank 0 alone reads, and sends the others their parts. False: every rank reads for
            itself. None: rank 0 reads what would be the same on every rank: iterable data, and loaders that instep
            does not build anew. Data that spreads itself over ranks needs False, or all parts but rank 0's are lost.
        even_batches: every rank runs the same number of steps, and one without samples replays some that do not
            count. False: such a rank ends earlier, as `join_uneven_inputs` allows.
        data_seed: what shuffling is derived from; None: the seed of the run.
        non_blocking: do not wait for copies from pinned memory to the device.
        use_stateful_dataloader: read iterable data through torchdata's StatefulDataLoader, which resumes without
            reading again. Map-style data resumes by arithmetic, with or without.

    Raises:
        SettingError: a value is of the wrong type.

    Example:
        >>> DataLoaderConfiguration(split_batches=True).even_batches
        True
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = int if field.name == "data_seed" else bool
            if (value is None and field.default is None) or type(value) is wanted:
                continue
            expected = wanted.__name__ + (" or None" if field.default is None else "")
            raise SettingError(f"{field.name}={value!r} must be {expected}", field=field.name, got=value)
