"""The meaning of `limit_train_batches` and its like."""

from __future__ import annotations

import math

from instep.errors import SettingError


def resolve_limit(limit: int | float | None, num_batches: int | None, name: str) -> int | float:
    """How many batches are used.

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
    """The smallest fraction that gives one batch, rounded up to few digits."""
    for digits in range(1, 17):
        fraction = math.ceil(10**digits / num_batches) / 10**digits
        if fraction <= 1.0 and fraction * num_batches < 1.1:
            return fraction
    return 1 / num_batches
