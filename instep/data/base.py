"""`BatchSource` and `PreparedLoader`: the interface through which a loop reads one rank's batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from instep.data.plan import Plan, Share
from instep.types import StateDict

UNEVEN = ("stop", "join", "error")
_LISTED = 16  # largest number of sample indices in an error message
UNKNOWN = -1  # stands for the number of samples of a batch that was not counted
_KEPT = 1024  # the numbers of samples of at least the last `_KEPT + history` batches are remembered
OWN_END = "own end"  # value of `uneven` for `even_batches=False`: each rank ends when its own data ends


class BatchSource(ABC):
    """Batches of this rank from one or several loaders, with their sizes.

    Only one pass runs at a time: call `set_epoch`, then perhaps `load_state_dict` or `start_at`, then iterate. Batches
    are numbered from 0 in an epoch; a resumed pass begins at `first_batch`. All values are the same on all ranks,
    except `share.mine`, `sample_indices` and, with `rank_state`, the state. If ranks may end after different numbers of
    batches (`even_batches=False`), each rank has its own `num_batches` and `share.last`. All ranks must call the
    methods that move the position: with dispatched data these are collectives, and only rank 0's state is complete.

    Args:
        world_size: number of ranks that share the data.

    Attributes:
        share: sizes of the current batch, and whether it is the last one of the pass. Set before the batch is yielded.
        first_batch: index in the epoch of the first batch of this pass.
        epoch: the epoch passed to the last `set_epoch`.
        rank_state: whether each rank has its own state; a saved state then fits only the same world size.
        history: number of latest batches for which `state_dict` can be called. If it is 2 or more, the numbers of
            samples of yielded batches are remembered too, to weigh the batches of an accumulation window. Set it to the
            window's size before a pass. `history` matters only if sizes of batches are not known beforehand, or if the
            data has its own state.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from instep.data import prepare_loader
        >>> source = prepare_loader(DataLoader(range(5), batch_size=2))
        >>> for epoch in range(2):
        ...     source.set_epoch(epoch)
        ...     for batch_idx, batch in enumerate(source, source.first_batch):
        ...         print(epoch, batch_idx, batch.tolist(), source.share.last)
        0 0 [0, 1] False
        0 1 [2, 3] False
        0 2 [4] True
        1 0 [0, 1] False
        1 1 [2, 3] False
        1 2 [4] True
    """

    rank_state: bool = False
    history: int = 1

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size
        self.share = Share()
        self.first_batch = 0
        self.epoch = 0
        self.cycle = 0
        self._given = 0  # batches of the epoch yielded so far, in sources that count them
        self._seen = array("q")  # samples of all ranks in each of the last batches, or UNKNOWN
        self._pending = False  # whether a position was loaded that no pass has used yet
        self._plan: Plan | None = None  # plan of the pass that begins at the current position

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """Numbers and sizes of the batches in the running pass, or in the next one."""

    @property
    def num_batches(self) -> int | None:
        """Number of batches in the epoch, up to the limit; None if unknown.

        A resumed pass ends at the same batch number.
        """
        return self.plan.total

    @property
    def epoch_batches(self) -> int | None:
        """Number of batches in a whole epoch.

        If an epoch is resumed with a different number of ranks, `num_batches` may be smaller.
        """
        return self.num_batches

    def set_epoch(self, epoch: int, cycle: int = 0) -> None:
        """Go to the beginning of an epoch, unless a state of this epoch was loaded and not used yet."""
        if not (self._pending and (epoch, cycle) == (self.epoch, self.cycle)):
            self._enter(epoch, cycle)

    @abstractmethod
    def _enter(self, epoch: int, cycle: int) -> None:
        """Go to the beginning of an epoch."""

    @abstractmethod
    def start_at(self, batches: int) -> None:
        """Make the next pass begin after this number of batches of the epoch."""

    @abstractmethod
    def state_dict(self, batches_done: int) -> StateDict:
        """Return the position in the data.

        Args:
            batches_done: number of batches of the epoch that are done: as many as the source has yielded, or up to
                `history` fewer.
        """

    @abstractmethod
    def load_state_dict(self, state: StateDict) -> None:
        """Make the next pass begin at the position of the state, in the state's epoch and order."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches."""

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"{type(self).__name__} has no length: the number of batches is not known")
        return self.num_batches

    def __bool__(self) -> bool:
        return True  # without this method, bool() would call __len__, which raises if the length is unknown

    @property
    def reads_once(self) -> bool:
        """Whether the data is an iterator, such as a generator, which gives each batch only once."""
        return False

    def empty_parts(self) -> list[str]:
        """Describe the loaders that have no batch, or that had none in the last pass."""
        return []

    def sample_indices(self, batch_idx: int) -> list[Any] | None:
        """Return the data set's indices of the samples in a batch of this rank; None if unknown."""
        return None

    def close(self) -> None:  # noqa: B027 (most sources hold nothing)
        """Release worker processes. May be called twice; the source can still be iterated afterwards."""

    def _start_pass(self) -> None:
        """Begin a pass: at the loaded position, or else at the epoch's beginning."""
        if not self._pending:
            self._enter(self.epoch, self.cycle)
        self._pending, self.share = False, Share()

    def _begin(self, first_batch: int) -> None:
        self.first_batch = first_batch
        self.share, self._plan, self._seen = Share(), None, array("q")

    def _give(self, share: Share) -> None:
        """Count the next batch as yielded, and remember its number of samples."""
        self.share = share
        self._given += 1
        if self.history > 1:
            self._seen.append(UNKNOWN if share.all is None else share.all)
            if len(self._seen) > 2 * (kept := _KEPT + self.history):
                del self._seen[:-kept]

    def _seen_between(self, start: int, stop: int) -> Sequence[int]:
        """Return the numbers of samples of the batches from `start` to `stop - 1`, for `Plan.sizes_seen`.

        The result is empty if the number of samples of batch `start` is unknown. An unknown number of a later batch is
        replaced by that of batch `start`.
        """
        first = self._given - len(self._seen)
        seen = self._seen[start - first : stop - first] if start >= first else ()
        if not seen or seen[0] == UNKNOWN:
            return ()
        return [seen[0] if samples == UNKNOWN else samples for samples in seen] if UNKNOWN in seen else seen


class DataShard(NamedTuple):
    """Rank of a process among those that share the data.

    Attributes:
        rank: this rank.
        world_size: number of ranks that share the data.
        seed: seed of all random numbers for the data, the same on all ranks.
    """

    rank: int
    world_size: int
    seed: int


class PreparedLoader(BatchSource):
    """Batches of this rank from one loader, as `prepare_loader` returns them.

    Args:
        loader: the user's loader.
        shard: the rank whose batches these are.
        frozen: whether every epoch repeats the first one.

    Attributes:
        loader: the user's loader, unchanged.
        dataset: the loader's data set, or None.
        batch_size: samples per rank and batch, None when unknown.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from instep.data import prepare_loader
        >>> source = prepare_loader(DataLoader(range(6), batch_size=2))
        >>> isinstance(source, PreparedLoader), source.batch_size
        (True, 2)
        >>> [batch.tolist() for batch in source]
        [[0, 1], [2, 3], [4, 5]]
    """

    def __init__(self, loader: Any, shard: DataShard, *, frozen: bool = False) -> None:
        super().__init__(shard.world_size)
        self.loader = loader
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        self.rank = shard.rank
        self.seed = shard.seed
        self.frozen = frozen
        self._set_epochs = _set_epoch_methods(loader)

    def reseed(self, seed: int) -> None:
        """Derive the order and all random numbers from another seed."""
        self.seed = seed

    @abstractmethod
    def start_before(self) -> None:
        """Make the next pass begin at the epoch's beginning, and end at the position where the last pass began."""

    @property
    def reads_once(self) -> bool:
        return hasattr(self.loader, "__next__")

    def empty_parts(self) -> list[str]:
        gives = self._given or (self.plan.total_is_final and self.num_batches)
        return [] if gives else [described(self.loader)]

    def _enter(self, epoch: int, cycle: int) -> None:
        """Go to the beginning of an epoch, and call `set_epoch` of the parts of the user's loader that have it."""
        self.epoch, self.cycle, self._pending = epoch, cycle, False
        for method in self._set_epochs:
            method(0 if self.frozen else epoch)
        self._begin(0)


def _set_epoch_methods(loader: Any) -> list[Callable[[int], Any]]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    parts.append(getattr(loader, "dataset", None))
    unique = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
    return [part.set_epoch for part in unique.values()]


def described(loader: Any) -> str:
    """Describe a user's loader by its class and the class of its data set, for a message.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> described(DataLoader(range(3))), described([1, 2])
        ('DataLoader of a range', 'list')
    """
    dataset, name = getattr(loader, "dataset", None), type(loader).__name__
    return name if dataset is None else f"{name} of a {type(dataset).__name__}"


def list_samples(indices: list[Any] | None, source: Any = None) -> str:
    """Format the indices of a batch's samples for a message: the first 16 of them at most.

    If the data set of `source` has a method `describe_sample(index)`, its text is added for each index.

    Example:
        >>> list_samples([3, 1, 2]), list_samples(None)
        ('[3, 1, 2]', 'unknown')
    """
    if indices is None:
        return "unknown"
    more = f" and {len(indices) - _LISTED} more" if len(indices) > _LISTED else ""
    described = getattr(getattr(source, "dataset", None), "describe_sample", None)
    shown = [f"{index!r} ({described(index)})" if described else repr(index) for index in indices[:_LISTED]]
    return f"[{', '.join(shown)}]{more}"
