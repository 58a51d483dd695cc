"""Settings of data: limits of batches such as `limit_train_batches`, and the `DataLoaderConfiguration`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from instep.errors import SettingError
from instep.utils.checks import FLAG, Check, check_fields, choice, is_int

LIMIT = Check(
    lambda value: is_int(value, 0) or (isinstance(value, float) and 0.0 <= value <= 1.0),
    "a number of batches (int, 0 or more) or a fraction (float, 0.0 to 1.0)",
    lambda value: value if isinstance(value, float) else int(value),
)
"""Check of a limit on a loader's batches: an int is a number (1: one batch), a float is a fraction (1.0: all)."""


STREAMS = ("auto", "divide", "dispatch", "as_is")
"""Values of the argument `streams`: how data without a length is divided over ranks and workers."""

_RESTORE = Check(lambda value: isinstance(value, bool) or value == "auto", '"auto", True or False')


def resolve_limit(limit: int | float | None, num_batches: int | None, name: str) -> int | float:
    """Return the number of batches that a limit leaves.

    Args:
        limit: a number of batches (int) or a fraction of the batches (float); None and 1.0 mean all batches.
        num_batches: number of batches on this rank; None if unknown.
        name: the setting's name, for the error.

    Returns:
        The number of batches; `math.inf` if neither the limit nor the data gives a number.

    Raises:
        SettingError: the limit is negative, a fraction above 1, a fraction of an unknown number, or a fraction too
            small for one batch.

    Example:
        >>> resolve_limit(0.5, 9, "limit_train_batches"), resolve_limit(20, 9, "limit_train_batches")
        (4, 9)
    """
    part: int | float = LIMIT(name, 1.0 if limit is None else limit)
    if isinstance(part, int):
        return part if num_batches is None else min(part, num_batches)
    if part == 0.0:
        return 0
    if num_batches is None:
        if part == 1.0:
            return math.inf
        raise SettingError(
            f"{name}={part!r}: the loader has no length to take a fraction of. When using an `IterableDataset` without "
            f"one, `Trainer({name})` must be `1.0` or an int.",
            field=name,
            got=part,
        )
    batches = int(num_batches * part)
    if batches == 0 and num_batches > 0:
        raise SettingError(
            f"{name}={part!r} of {num_batches} batches is less than one batch. Give at least "
            f"{_smallest(num_batches)}, or an int",
            field=name,
            got=part,
        )
    return batches


def _smallest(num_batches: int) -> float:
    """Return the smallest fraction that gives one batch, rounded up to a few digits."""
    for digits in range(1, 17):
        fraction = math.ceil(10**digits / num_batches) / 10**digits
        if fraction <= 1.0 and fraction * num_batches < 1.1:
            return fraction
    return 1 / num_batches


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """Settings by which `Accelerator.prepare` divides loaders over the ranks.

    Args:
        split_batches: whether the loader's batch size is that of all ranks together, not that of each rank.
        dispatch_batches: True: only rank 0 reads the data, and sends the other ranks their parts. False: every rank
            reads for itself. None: rank 0 reads data that would be the same on every rank: iterable data, and loaders
            that instep cannot rebuild. For data that already differs by rank, pass False; otherwise all parts but rank
            0's are lost.
        even_batches: whether every rank runs the same number of steps. If True, a rank without samples left repeats a
            batch, which does not count. False: a rank without samples left ends earlier, which `join_uneven_inputs`
            allows.
        data_seed: seed of the shuffling; None for the seed of the run.
        non_blocking: whether the host does not wait for copies from pinned memory to the device.
        use_stateful_dataloader: whether to read iterable data through torchdata's StatefulDataLoader, which resumes
            without reading the data again. Map-style data never needs it: its position is calculated.
        restore_position: where a loader continues after `load_state`, if K batches of its epoch are done. "auto": at
            batch K, also in a script that skips K batches itself. True: always at batch K. False: at the epoch's
            beginning, so the script must skip.
        use_distributed_sampler: whether to divide the data over the ranks. False: the data already differs by rank, and
            each rank reads its own data completely.
        streams: how iterable data is divided if each rank reads for itself (`dispatch_batches=False`). "auto" divides
            the data if the first samples show that all ranks and workers read the same. "divide" divides in any case;
            "dispatch" is `dispatch_batches=True`; with "as_is" each rank uses all that it reads. Any value but "auto"
            takes precedence over `dispatch_batches`.

    Raises:
        SettingError: a value is of the wrong type.

    Example:
        >>> DataLoaderConfiguration(split_batches=True).even_batches
        True
    """

    split_batches: Annotated[bool, FLAG] = False
    dispatch_batches: Annotated[bool | None, FLAG] = None
    even_batches: Annotated[bool, FLAG] = True
    data_seed: Annotated[int | None, Check(is_int, "an integer, or None", int)] = None
    non_blocking: Annotated[bool, FLAG] = False
    use_stateful_dataloader: Annotated[bool, FLAG] = False
    restore_position: Annotated[bool | Literal["auto"], _RESTORE] = "auto"
    use_distributed_sampler: Annotated[bool, FLAG] = True
    streams: Annotated[str, choice(*STREAMS)] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
