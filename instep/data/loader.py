"""`prepare_loader`: makes a user's loader run in step on all ranks, count every sample once, and resume."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from instep.data.base import OWN_END, UNEVEN, DataShard, PreparedLoader, described
from instep.data.config import STREAMS, resolve_limit
from instep.data.foreign_sampler import ForeignOrder, generators, is_distributed, order_digest
from instep.data.index import IndexLoader, rebuild
from instep.data.sampler import ShardedBatches, ShardedBatchSampler, ShardedSampler, SplitBatches
from instep.distributed import gather_object
from instep.errors import DataError, SettingError
from instep.types import Stateful
from instep.utils.checks import choice
from instep.utils.imports import require
from instep.utils.seed import derive_seed
from instep.utils.warn import warn_user


def prepare_loader(
    loader: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    shuffle_allowed: bool = True,
    use_distributed_sampler: bool = True,
    seed_samples: bool = False,
    batch_size: int | None = None,
    limit: int | float | None = None,
    limit_name: str | None = None,
    stage: str = "train",
    device: torch.device | None = None,
    uneven: str | None = None,
    split_batches: bool = False,
    dispatch: bool | None = False,
    even_batches: bool = True,
    stateful: bool = False,
    streams: str = "auto",
) -> PreparedLoader:
    """Prepare a loader for this rank. Collective: all ranks call it with the same kind of loader.

    A plain `DataLoader` over a map-style data set gets instep's order: shuffled by (seed, epoch) or sequential, divided
    over the ranks by samples, and resumable at another world size and worker count. Any other `sampler` is drawn by
    (seed, epoch), the same on all ranks, and then divided in the same way. A `batch_sampler` is divided by whole
    batches. A `DistributedSampler`, or a sampler with a `state_dict`, already divides the data, so instep does not
    divide it again. Iterable data, and other data without a length, is divided if the ranks, or the workers of one
    rank, read the same: see `streams`. All other loaders, such as a list of batches, are used as they are: each rank
    iterates its own.

    Args:
        loader: the user's loader. It is not changed.
        rank: this rank among those that share the data.
        world_size: number of these ranks.
        seed: seed of shuffling and workers, the same on all ranks. If the loader or its sampler has a generator, the
            generator's seed is mixed in.
        shuffle_allowed: whether shuffling is allowed. If False, a shuffled loader is read in sequence, and every other
            loader repeats the order of its first epoch.
        use_distributed_sampler: whether to divide the loader; with False every rank iterates it as it is.
        seed_samples: whether to seed random augmentation by (seed, epoch, sample index), independently of world size
            and workers.
        batch_size: batch size to use instead of the loader's: per rank, or of all ranks with `split_batches`.
        limit: number of batches per rank (int), or fraction of the batches (float); None for all.
        limit_name: the limit's name in errors; None: `limit_train_batches` and so on, by the stage.
        stage: "train", "val", "test" or "predict". A loader's own `state_dict` is kept for a resume only for "train".
        device: device that the batches will be moved to. For CUDA, batches of map-style and dispatched data are put
            into pinned memory, whatever the loader's `pin_memory` is, unless they already have tensors on a device.
        uneven: what to do if ranks have different numbers of batches, which is never so if instep divides the data.
            "stop" ends with the first exhausted rank, and warns of the batches that other ranks leave out. With "join"
            exhausted ranks replay a batch with weight 0. "error" raises an error. None: "stop" for training, "join" for
            other stages.
        split_batches: whether the loader's batch size is that of all ranks together, so that each batch is split over
            them.
        dispatch: True: only rank 0 reads, and sends the other ranks their parts (see `DispatchLoader`). For a plain
            `DataLoader`, rank 0 reads larger batches and slices them, so that each rank gets the loader's batch size.
            For a loader that makes its own batches, each rank gets whole batches, unless `split_batches` is set. With
            None, rank 0 reads only data that is probably the same on every rank: iterable data, and loaders that instep
            cannot rebuild. With `use_distributed_sampler=False`, a sampler that divides the data, or a data pipe of
            torch, every rank reads.
        even_batches: whether all ranks run the same number of steps. If False, a rank that has no more data ends
            earlier than the others; it neither replays a batch with weight 0 nor stops the others. Then `num_batches`
            differs per rank. In one case a rank still replays a sample: a dispatched batch before the last one has
            fewer samples than there are ranks.
        stateful: whether to read a plain `DataLoader`'s iterable data through torchdata's StatefulDataLoader, which
            resumes without reading the data again (`stage="train"` only). For map-style data nothing changes.
        streams: how data without a length is divided, as in `Trainer(streams=...)`. "auto" divides the data if the
            first samples show that all ranks and workers read the same. "divide" divides in any case; "dispatch" is
            `dispatch=True`; with "as_is" each rank and worker uses all that it reads, as with
            `use_distributed_sampler=False`.

    Returns:
        The batches of this rank, with `loader` as an attribute.

    Raises:
        SettingError: a setting does not work with this loader.
        DataError: the loader cannot be iterated, or ranks hold different data although they must hold the same.
        MissingPackageError: `stateful` needs torchdata.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> source = prepare_loader(DataLoader(range(10), batch_size=4))  # one process gets all batches
        >>> [batch.tolist() for batch in source]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    if uneven is not None:
        choice(*UNEVEN)("uneven", uneven)
    choice(*STREAMS)("streams", streams)
    if not even_batches and uneven not in (None, "stop"):
        raise SettingError(
            f"uneven={uneven!r} is about ranks that end together; with even_batches=False each ends alone. Choose one",
            field="uneven",
            got=uneven,
        )
    if not hasattr(loader, "__iter__"):
        raise DataError(f"{type(loader).__name__} cannot be iterated. Give a DataLoader or another iterable of batches")
    name = limit_name or f"limit_{stage}_batches"
    indexed = type(loader) is DataLoader and _is_map_style(loader) and _has_end(loader)
    pin = getattr(loader, "pin_memory", False) or (device is not None and device.type == "cuda")
    split_batches = split_batches and world_size > 1
    size = _own_size(loader) if batch_size is None else batch_size
    if split_batches and size is not None:
        size = _part_of(size, world_size)
    uneven = ("stop" if stage == "train" else "join") if uneven is None else uneven
    wanted = _Pass(DataShard(rank, world_size, seed), limit, name, uneven if even_batches else OWN_END)
    if not use_distributed_sampler and streams in ("divide", "dispatch"):
        raise _unfit(loader, "use_distributed_sampler=False leaves the data as it is", field="streams", got=streams)
    as_is = streams == "as_is" or not use_distributed_sampler
    if streams != "auto" and not indexed and not _is_map_style(loader) and use_distributed_sampler:
        dispatch = streams == "dispatch"
    if dispatch is None:
        dispatch = use_distributed_sampler and not indexed and not _read_by_all_ranks(loader)
    if dispatch and world_size > 1:
        if not use_distributed_sampler or _read_by_all_ranks(loader):
            raise _unfit(
                loader,
                "rank 0 cannot read it alone: it gives each rank a part of its own, or is a data pipe, at which torch "
                "waits for all ranks. Use dispatch=False, or a loader of all data",
                field="dispatch",
            )
        read = partial(
            prepare_loader, loader, seed=seed, shuffle_allowed=shuffle_allowed, seed_samples=seed_samples, stage=stage,
            stateful=stateful, streams="as_is" if as_is else "auto",
        )  # fmt: skip
        return _dispatched(
            loader, read, wanted, size, batch_size=batch_size, split=split_batches, even=even_batches, pin=pin
        )
    if split_batches:
        if _can_batch(loader):
            batch_size, split_batches = size, False
        elif not indexed or loader.batch_sampler is None:
            raise _no_split(loader)
    if indexed:
        spread = _partitioning(loader, wanted, batch_size, shuffle_allowed, use_distributed_sampler, split_batches)
        return _by_index(loader, wanted, spread, batch_size, seed_samples, pin)
    if seed_samples:
        warn_user(
            f"seed_samples=True has no effect on this {type(loader).__name__}: it hands out no sample indices through "
            "instep"
        )
    loader = _rebuilt(loader, batch_size, stateful=stateful and stage == "train")
    if world_size > 1 and use_distributed_sampler:
        _check_spread(loader, world_size)
    divide = None if as_is or _is_map_style(loader) else streams
    return _by_iteration(loader, wanted, frozen=not shuffle_allowed, resumable=stage == "train", divide=divide)


def _rebuilt(loader: Any, batch_size: int | None, stateful: bool) -> Any:
    """Rebuild the loader if `batch_size` differs from its own; if `stateful`, as torchdata's StatefulDataLoader."""
    if batch_size is not None and batch_size != getattr(loader, "batch_size", None):
        if not _can_batch(loader):
            raise _no_batch_size(loader, batch_size)
        loader = rebuild(loader, batch_size=batch_size, drop_last=loader.drop_last)
    if stateful and type(loader) is DataLoader and not _is_map_style(loader):
        torchdata = require("torchdata.stateful_dataloader", extra="data", purpose="stateful=True")
        kind = torchdata.StatefulDataLoader
        loader = rebuild(loader, kind, batch_size=loader.batch_size, drop_last=loader.drop_last)
    return loader


def _check_spread(loader: Any, world_size: int) -> None:
    """Raise SettingError if instep cannot divide map-style data, which would then be the same on every rank."""
    if _is_map_style(loader) and not _read_by_all_ranks(loader):
        raise SettingError(
            f"{type(loader).__name__} would give every one of the {world_size} ranks the same data: instep does not "
            "build subclasses of DataLoader, or loaders whose sampler has no end or no len(), anew. Give it a "
            "DistributedSampler (torchdata: StatefulDistributedSampler), use a plain DataLoader, or set "
            "use_distributed_sampler=False if the ranks' data differ already",
            field="use_distributed_sampler",
            got=True,
        )


@dataclass(frozen=True)
class _Pass:
    """Arguments that all kinds of loaders need: the rank, the limit, and what to do if a rank has fewer batches."""

    shard: DataShard
    limit: int | float | None
    name: str
    uneven: str

    def steps(self, num_batches: int | None) -> int | None:
        """Return the limit as a number of batches; None if it does not leave out any batch."""
        limit = resolve_limit(self.limit, num_batches, self.name)
        return None if limit == math.inf or limit == num_batches else int(limit)

    def at_most(self, estimate: int | None) -> int | None:
        """Return the limit as a number of batches, for data with an estimated length.

        An int limit does not use the estimate.
        """
        return self.steps(None if isinstance(self.limit, int) else estimate)

    def everyone(self, mine: Any, kind: str = "") -> list[Any]:
        """Return the values of all ranks.

        If their loaders are of different kinds, raise DataError on every rank. Collective.
        """
        pairs = gather_object((kind, mine)) if self.shard.world_size > 1 else [(kind, mine)]
        if any(other != kind for other, _ in pairs):
            kinds = ", ".join(f"rank {rank}: {other}" for rank, (other, _) in enumerate(pairs))
            raise DataError(f"the loaders of the ranks are of different kinds ({kinds}). Give every rank the same kind")
        return [value for _, value in pairs]


@dataclass(frozen=True)
class _Partitioning:
    """Sampler of the indices of a map-style loader, and whether the ranks divide its order."""

    sampler: ShardedSampler
    drawn: ForeignOrder | None
    shared: bool
    frozen: bool


def _partitioning(
    loader: DataLoader[Any], wanted: _Pass, batch_size: int | None, shuffle_allowed: bool, spread: bool, split: bool
) -> _Partitioning:
    batch_sampler: Any = loader.batch_sampler
    items = _index_source(loader)
    spreads_itself = is_distributed(items) or ForeignOrder(items).stateful is not None
    shared = wanted.shard.world_size == 1 or (spread and not spreads_itself)
    ranks: dict[str, Any] = {"rank": wanted.shard.rank, "world_size": wanted.shard.world_size} if shared else {}
    if wanted.uneven == OWN_END:
        ranks["even"] = False
    plain = type(batch_sampler) is BatchSampler
    if batch_size is not None and not plain:
        raise _no_batch_size(loader, batch_size)
    if plain and not spreads_itself:
        inner: Any = batch_sampler.sampler
        own = _is_plain_order(inner)
        drawn = None if own else ForeignOrder(inner)
        shuffle = own and shuffle_allowed and type(inner) is RandomSampler
        order_of = getattr(loader.dataset, "_instep_order_of", None)  # the data set makes its shuffled order itself
        sampler: ShardedSampler = ShardedBatchSampler(
            len(inner),
            batch_size or batch_sampler.batch_size,
            shuffle=shuffle,
            seed=wanted.shard.seed,
            drop_last=batch_sampler.drop_last,
            order=drawn or (order_of and partial(order_of, shuffle)),
            **ranks,
        )
        return _Partitioning(sampler, drawn, shared, frozen=not shuffle_allowed)
    if plain and batch_size is not None:
        items = BatchSampler(batch_sampler.sampler, batch_size, batch_sampler.drop_last)
    drawn = ForeignOrder(items)
    if split:
        if not shared:
            raise _no_split(loader)
        sampler = SplitBatches(drawn, seed=wanted.shard.seed, **ranks)
    else:
        drop = shared and getattr(batch_sampler, "drop_last", False) is True
        sampler = ShardedBatches(drawn, seed=wanted.shard.seed, drop_last=drop, single=batch_sampler is None, **ranks)
    return _Partitioning(sampler, drawn, shared, frozen=not shuffle_allowed)


def _dispatched(
    loader: Any,
    read: Callable[..., PreparedLoader],
    wanted: _Pass,
    size: int | None,
    *,
    batch_size: int | None,
    split: bool,
    even: bool,
    pin: bool,
) -> PreparedLoader:
    """Make a `DispatchLoader`.

    Rank 0 reads through `read`, and gives each rank `size` samples of each batch. With `split`, it reads batches of
    `batch_size` samples (None: the loader's batches). Without `split`, it reads larger batches, for all ranks together;
    if the loader makes its own batches, each rank gets whole batches instead of slices.
    """
    from instep.data.dispatch import DispatchLoader  # imported late: used only for dispatched data

    whole = False
    if not split:
        whole = size is None or not _can_batch(loader)
        batch_size = batch_size if whole or size is None else size * wanted.shard.world_size
    group = wanted.shard.world_size if whole else 1
    reader = partial(_reader, partial(read, batch_size=batch_size), wanted, group)
    return DispatchLoader(loader, reader, wanted.shard, batch_size=size, whole=whole, even=even, pin=pin)


def _reader(read: Callable[..., PreparedLoader], wanted: _Pass, group: int) -> PreparedLoader:
    """Make the source that rank 0 reads for all ranks. One step takes `group` of its batches."""
    reader = read()
    batches = reader.num_batches
    whole = None if batches is None else -(-batches // group)
    steps = wanted.steps(whole)
    return reader if steps is None else read(limit=steps * group)


def _by_index(
    loader: DataLoader[Any], wanted: _Pass, spread: _Partitioning, batch_size: int | None, seed_samples: bool, pin: bool
) -> PreparedLoader:
    sampler = spread.sampler
    items = _index_source(loader)
    given = generators(items)
    mine = {
        "samples": _chosen(loader.dataset) if wanted.shard.world_size > 1 else None,
        "ends": _ends(loader.dataset) if spread.shared and wanted.shard.world_size > 1 else None,
        "length": len(items.sampler) if isinstance(sampler, ShardedBatchSampler) else len(items),
        "units of a step": sampler.per_step,
        "drop_last": sampler.drop_last,
        "shuffle": getattr(sampler, "shuffle", None),
        "seed": wanted.shard.seed,
        "generator": given[0].initial_seed() if given else None,
    }
    everyone = wanted.everyone(mine, "data with a length")
    if spread.shared:
        _check_alike(everyone)
        if wanted.shard.rank == 0 and len({other["ends"] for other in everyone}) > 1:
            warn_user(
                f"the {described(loader)} has other samples on some of the {wanted.shard.world_size} ranks, and is "
                "divided over them: of each rank's samples only a part is used. Every rank must build the same data "
                "set; if each rank holds a part of its own, set use_distributed_sampler=False"
            )
        # all ranks use the seed of rank 0's generator, even if they have seeded their generators differently
        mine = everyone[0]
    lengths, peers = {other["length"] for other in everyone}, list(map(_used_and_step, everyone))
    if not spread.shared and len(lengths) > 1 and wanted.uneven == "join":
        loader = _rebuilt(loader, batch_size, stateful=False)
        return _by_iteration(loader, wanted, frozen=spread.frozen, resumable=True, divide=None)
    seed = wanted.shard.seed
    if mine["generator"] is not None:
        seed = sampler.seed = derive_seed(seed, "generator", mine["generator"])
    whole = sampler.steps
    if not spread.shared:
        whole = _common_length(wanted.everyone(whole), wanted, loader)
    limit = wanted.steps(whole)
    sampler.limit_steps = whole if limit is None and whole < len(sampler) else limit
    return IndexLoader(
        loader,
        sampler,
        wanted.shard._replace(seed=seed),
        drawn=spread.drawn,
        shared=spread.shared,
        peers_even=len(set(peers)) == 1,
        peers=peers if isinstance(sampler, ShardedBatchSampler) and not spread.shared else (),
        single=loader.batch_sampler is None,
        seed_samples=seed_samples,
        pin=pin,
        frozen=spread.frozen,
    )


_Claim = tuple[int | None, int | None]  # a reliable and an estimated number of batches


def _by_iteration(loader: Any, wanted: _Pass, *, frozen: bool, resumable: bool, divide: str | None) -> PreparedLoader:
    """Prepare a loader whose own iterator makes the batches, in an order that instep does not know.

    `divide` says how a loader without a length is divided over the ranks, as the argument `streams` does; None: it is
    not divided.
    """
    stateful, rewinds = _stateful_part(loader), None
    if not resumable:  # no resume needs the loader's state, so the state is not copied at every batch
        rewinds, stateful = None if isinstance(loader, DataLoader) else stateful, None
    length, estimate = mine = _lengths(loader)
    everyone = wanted.everyone(mine, "an iterable of batches")
    lengths = [length for length, _ in everyone]
    common: dict[str, Any] = {"uneven": wanted.uneven, "stateful": stateful, "frozen": frozen, "rewinds": rewinds}
    if divide is not None and None in lengths:
        from instep.streams.loader import DividedLoader  # imported late: used only for data without a length

        def sizes(divided: bool) -> tuple[int | None, int | None]:
            estimate = _lengths(loader, wanted.shard.world_size)[1] if divided else None
            # if there is no estimate for all ranks together, use the estimates of the single ranks
            estimate = estimate or _estimate(mine, everyone, wanted)
            return estimate, wanted.at_most(estimate)

        return DividedLoader(loader, wanted.shard, ask=divide == "auto", sizes=sizes, resumable=resumable, **common)
    from instep.data.stream import StreamLoader  # imported late: used only for data without indices

    if None in lengths or (len(set(lengths)) > 1 and wanted.uneven == "join"):
        estimate, length = _estimate(mine, everyone, wanted), None
    elif wanted.uneven != OWN_END:
        length = _common_length(lengths, wanted, loader)
    limit = wanted.steps(length) if length is not None else wanted.at_most(estimate)
    return StreamLoader(loader, wanted.shard, length=length, estimate=estimate, limit=limit, **common)


def _estimate(mine: _Claim, everyone: list[_Claim], wanted: _Pass) -> int | None:
    """Return the estimated number of batches: of this rank if each rank ends on its own, else of all ranks."""
    numbers = mine if wanted.uneven == OWN_END else [number for claim in everyone for number in claim]
    return (max if wanted.uneven == "join" else min)((one for one in numbers if one is not None), default=None)


def _lengths(loader: Any, ranks: int = 1) -> _Claim:
    """Return a reliable and an estimated number of batches, if `ranks` ranks divide the data; None if unknown."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader.dataset, Sized):
            return None, None
        # len(loader) is not called, since torch would then warn if the data set yields more samples
        samples = len(loader.dataset)
        size = (loader.batch_size or 1) * ranks
        return None, samples // size if loader.drop_last else -(-samples // size)
    return _length(loader), None


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def _stateful_part(loader: Any) -> Stateful | None:
    """Return the loader, or its data set, if it has a state with the position in the data; None if neither has one."""
    if isinstance(loader, Stateful):
        sampler = getattr(loader, "sampler", None)  # loaders of torchdata.nodes have no sampler
        if type(loader).__module__.startswith("torchdata.") and type(sampler) is RandomSampler:
            raise SettingError(
                "torchdata's StatefulDataLoader resumes wrongly, without a word, with sampler=torch.utils.data."
                "RandomSampler(...). Use shuffle=True, or torchdata.stateful_dataloader.sampler.RandomSampler",
                field="sampler",
                got=sampler,
            )
        return loader
    if type(loader) is DataLoader and isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0:
        dataset: Any = loader.dataset
        return dataset if isinstance(dataset, Stateful) else None
    return None


def _common_length(lengths: list[int], wanted: _Pass, loader: Any) -> int:
    """Return the number of steps that all ranks run, from the number of batches of each rank."""
    if wanted.uneven == OWN_END:
        return max(lengths)
    if len(set(lengths)) > 1:
        numbers = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
        if wanted.uneven == "error":
            raise DataError(f"ranks have different numbers of batches ({numbers}). Give every rank as many")
        if wanted.shard.rank == 0:
            warn_user(
                f"ranks have different numbers of batches ({numbers}) in their {described(loader)}. With uneven='stop' "
                f"each epoch ends after {min(lengths)}, and leaves out {sum(lengths) - len(lengths) * min(lengths)} "
                "batches. Trainer(uneven='join') trains on all of them"
            )
    return min(lengths)


def _check_alike(everyone: list[dict[str, Any]]) -> None:
    """Raise DataError if ranks hold different data sets or settings, which would repeat and lose samples."""
    for rank, other in enumerate(everyone):
        for key, value in other.items():
            if key in ("generator", "ends") or value == everyone[0][key]:
                continue
            differs = f"{key} is {value} on rank {rank} but {everyone[0][key]} on rank 0"
            if key == "samples":
                differs = f"Subset has other samples on rank {rank} than on rank 0"
            raise DataError(
                f"the loader's {differs}. Every rank must build the same data set and loader (give random_split a "
                "generator with a seed); if each rank holds a part of its own, set use_distributed_sampler=False"
            )


def _chosen(dataset: Any) -> str | None:
    """Return a digest of the indices in a `Subset`; None for other data."""
    chosen = []
    while isinstance(dataset, Subset):
        chosen.append(order_digest(torch.as_tensor(dataset.indices)))
        dataset = dataset.dataset
    return " ".join(chosen) or None


def _used_and_step(of_rank: dict[str, Any]) -> tuple[int, int]:
    """Return how many units (samples or batches) a rank uses in an epoch, and how many in a step."""
    length, step = of_rank["length"], of_rank["units of a step"]
    return length - length % step if of_rank["drop_last"] else length, step


def _ends(dataset: Any) -> tuple[int, ...]:
    from instep.data.marks import marks_of_ends  # imported late: not used by a single process

    return marks_of_ends(dataset)


def _is_plain_order(sampler: Any) -> bool:
    if type(sampler) is not RandomSampler:
        return type(sampler) is SequentialSampler
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _has_end(loader: DataLoader[Any]) -> bool:
    length = _length(_index_source(loader))
    return length is not None and length < sys.maxsize


def _index_source(loader: DataLoader[Any]) -> Any:
    """Return the loader's batch sampler, or its sampler of single indices if it does not form batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _is_map_style(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _read_by_all_ranks(loader: Any) -> bool:
    for items in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        stateful = ForeignOrder(items).stateful if items is not None else None
        known = stateful is not None and not type(stateful).__module__.startswith(("torch.", "torchdata."))
        if is_distributed(items) or known:
            return True
    # At the start of a pass over a data pipe, torch's DataLoader makes a process group of all ranks.
    return isinstance(getattr(loader, "dataset", None), torch.utils.data.IterDataPipe)


def _own_size(loader: Any) -> int | None:
    """Return the loader's batch size; None if it is not known."""
    size = getattr(loader, "batch_size", None)
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if size is None else size
    return size if isinstance(size, int) else None


def _can_batch(loader: Any) -> bool:
    """Return True if the loader can be rebuilt with another batch size."""
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return False
    return _has_end(loader) or (loader.batch_size is not None and not _is_map_style(loader))


def _part_of(size: int, world_size: int) -> int:
    """Return the batch size per rank if the ranks split batches of `size`; raise SettingError if it does not divide."""
    if size % world_size:
        below = size // world_size * world_size
        nearest = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise SettingError(
            f"split_batches=True divides batches of {size} over {world_size} ranks, which does not come out even. Use "
            f"batch_size={nearest}",
            field="batch_size",
            got=size,
        )
    return size // world_size


def _unfit(loader: Any, why: str, *, field: str, got: Any = True) -> SettingError:
    return SettingError(f"{field}={got!r} cannot be had with this {type(loader).__name__}: {why}", field=field, got=got)


def _no_split(loader: Any) -> SettingError:
    return _unfit(
        loader,
        "it makes or spreads its batches itself, so they cannot be split on every rank. Let rank 0 read and split them "
        "(dispatch=True), or use split_batches=False",
        field="split_batches",
    )


def _no_batch_size(loader: Any, batch_size: int) -> SettingError:
    return _unfit(
        loader,
        "it makes its batches itself. Use a plain DataLoader with a batch_size, or leave global_batch_size, from which "
        "the batch size per rank follows, out",
        field="batch_size",
        got=batch_size,
    )
