"""How the Accelerator prepares loaders."""

from __future__ import annotations

from dataclasses import dataclass, fields

from instep.errors import SettingError


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How `Accelerator.prepare` spreads loaders over the ranks.

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
