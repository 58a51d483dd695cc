"""Divide a stream among several readers that all read it in the same order.

A reader is one loader worker of a rank, or the rank itself if it has no workers. Each reader reads the whole stream, in
blocks of one batch, and yields only its own blocks. torch takes batches from the workers in turn, so batch j of rank r
of n is block j * n + r, with any number of workers. A position is a number of samples of the common order, for all
ranks together, so it fits any number of ranks and workers.

In the first pass, a comparison of the first samples shows whether the readers read the same samples. Each reader keeps
these samples, so that no sample is read twice. The main process gets digests of the samples from its workers through
shared memory, and exchanges the digests with the other ranks.

Random numbers that the data set draws are seeded by block, in the same way for all readers. So a data set that shuffles
or augments by the global generators gives the samples and the order of one process.
"""

from __future__ import annotations

import copy
import importlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, combinations, count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, _utils, get_worker_info

from instep.data.base import DataShard, described
from instep.data.index import rebuild
from instep.data.marks import mark_of
from instep.data.seeding import RandomStream, seed_generators
from instep.data.workers import start_workers
from instep.distributed import gather_object, raise_together
from instep.distributed.nested import iter_leaves
from instep.errors import DataError
from instep.types import StateDict, Stateful
from instep.utils.seed import derive_seed
from instep.utils.warn import warn_user

# Number of first samples that are compared. 16 show whether all readers read the same samples; if they do not, 256 show
# which samples they share.
AT_FIRST, COMPARED = 16, 256
# Maximum number of seconds for reading the first samples; from a slow stream, fewer samples are compared.
_PATIENCE_S = {AT_FIRST: 2.0, COMPARED: 5.0}
_MOST_BYTES = 64 << 20  # maximum number of bytes of the samples that are kept for the comparison
# Two readers count as sharing samples if more than one sample in `_SHARED` is the same. Fewer may be equal by chance.
_SHARED = 20
_QUIET_AFTER, _WATCH_EVERY = 3, 64  # as QUIET_AFTER and WATCH_EVERY in `instep.data.stream`
_LOOK_EVERY_S = 0.001
# The cost of reading for other ranks is reported if it is more than 5 % of a pass and more than one second.
_COSTS, _COSTS_S = 0.05, 1.0

_COMMAND, _SEED, _SEED_LOW, _EPOCH, _CYCLE, _SKIP, _STRICT, _HEAD = range(8)
_PHASE, _COUNT, _ENDED, _READ_NS, _OTHERS_NS, _DIGESTS = range(6)  # columns of a reader's row in `_Board.rows`
_WAIT, _GIVE_UP, _GO = 0, 1, 2  # commands to the readers; `_GO + n` tells a reader to read n first samples
_ASKED = (_WAIT, AT_FIRST, COMPARED)


class Pattern(NamedTuple):
    """Whether ranks and workers read the same samples, which are then divided among them.

    Attributes:
        ranks: whether the ranks read the same samples.
        workers: whether the workers of a rank read the same samples.
    """

    ranks: bool
    workers: bool

    @property
    def common(self) -> bool:
        """Whether all readers read in one common order."""
        return self.ranks and self.workers


PATTERNS = {
    "ranks and workers": Pattern(True, True),
    "ranks": Pattern(True, False),
    "workers": Pattern(False, True),
    "nothing": Pattern(False, False),
}
"""Patterns by the names that states and messages use for them."""
_ORDER = tuple(PATTERNS.values())


class _Board:
    """Table through which a main process and its readers communicate; in shared memory if the readers are workers."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.head = torch.zeros(_HEAD, dtype=torch.int64)
        self.rows = torch.zeros(max(1, workers), _DIGESTS + COMPARED, dtype=torch.int64)
        if workers:
            self.head.share_memory_()
            self.rows.share_memory_()


class _Reader:
    """A reader's pass over the stream."""

    def __init__(self, owner: DividedDataset) -> None:
        self._owner = owner
        worker = get_worker_info() if owner.board.workers else None
        self._in_main, self._worker = worker is None, 0 if worker is None else worker.id
        self.row = owner.board.rows[self._worker]
        self.is_open = self.ended = False
        self.read = 0  # number of samples of the stream that this reader has read so far
        self.at = 0
        self._ahead: deque[Any] = deque()
        self._bytes = 0
        self._first_state: StateDict = {}
        self._quiet: float = 0  # number of consecutive blocks that drew no random numbers

    # ---- reading the stream

    def open(self) -> None:
        """Start the stream, or continue it from a restored state."""
        owner, head = self._owner, self._owner.board.head.tolist()
        self.is_open = True
        self._place = head[_EPOCH], head[_CYCLE]
        self._seed = head[_SEED] << 32 | head[_SEED_LOW]
        self._random = RandomStream(self._seed, "data")
        self.row.zero_()
        if not self._in_main:
            if owner.alone:
                _utils.worker._worker_info = None  # pyright: ignore[reportPrivateImportUsage]
            set_epoch = getattr(owner.source, "set_epoch", None)
            if callable(set_epoch):  # a persistent worker's copy of the data set has the old epoch
                set_epoch(head[_EPOCH])
        restored, owner.restored = owner.restored, None
        with self._seeded("start", 0):
            # One number is drawn, as the iterator of an undivided DataLoader does.
            torch.empty((), dtype=torch.int64).random_()
            inner = None if restored is None else restored["inner"]
            if inner is not None and isinstance(owner.source, Stateful):
                owner.source.load_state_dict(copy.deepcopy(inner))
            self._items = owner.iterate()
            self._stateful = next((one for one in (owner.source, self._items) if isinstance(one, Stateful)), None)
            if inner is not None and self._stateful is not None and self._stateful is self._items:
                self._stateful.load_state_dict(copy.deepcopy(inner))
        if restored is not None:
            self.at = restored["at"]
            self.read = restored["read"] if inner is not None and self._stateful is not None else 0
        self._first_state = {"read": self.read, "inner": inner}
        if self._stateful is not None and inner is None:
            self._first_state["inner"] = copy.deepcopy(self._stateful.state_dict())

    def _seeded(self, number: int | str, position: int, watch: bool = False) -> Any:
        """Seed the random generators for a block; in the main process, only inside the `with` block."""
        pattern = self._owner.pattern
        own: int | str = 0
        if pattern is not None and not pattern.common and position >= COMPARED:
            rank, worker = 0 if pattern.ranks else self._owner.shard.rank, 0 if pattern.workers else self._worker
            own = f"{rank}.{worker}" if worker else rank
        if self._in_main:
            return self._random.at(own, *self._place, number, watch=watch)
        seed_generators(derive_seed(self._seed, "data", own, *self._place, number))
        return nullcontext()

    def _fetch(self, most: int) -> list[Any]:
        """Read the samples of one block."""
        number, began = self.read // self._owner.unit, time.perf_counter_ns()
        if self._in_main and self._quiet >= _QUIET_AFTER and number % _WATCH_EVERY:
            items = list(islice(self._items, most))
        else:
            with self._seeded(number, self.read, watch=True):
                items = list(islice(self._items, most))
                # In the main process, the stream may still be at the end of the last pass. Then start it from the
                # beginning.
                if not items and not self.read and self._in_main:
                    self._items = self._owner.iterate()
                    items = list(islice(self._items, most))
            self._note_draws(number)
        self.read += len(items)
        self.row[_READ_NS] += time.perf_counter_ns() - began
        self.ended = len(items) < most
        return items

    def _note_draws(self, number: int) -> None:
        if not self._in_main or not self._random.drew:
            self._quiet += 1
            return
        if self._quiet >= _QUIET_AFTER:
            warn_user(
                f"{self._owner.name} drew random numbers for batch {number} after {number} batches without. Those that "
                "it drew unseen came from the training's generators, so ranks may have other samples, and a resume "
                "within this epoch may not repeat them. Draw from a generator of the data set's own"
            )
        self._quiet = -math.inf

    def _next(self, most: int) -> list[Any]:
        """Return the next `most` samples, or fewer at the end of the stream."""
        items = [self._ahead.popleft() for _ in range(min(most, len(self._ahead)))]
        if len(items) < most and not self.ended:
            items += self._fetch(most - len(items))
        return items

    def units(self) -> Iterator[Any]:
        """Yield this reader's part of the stream: samples, or batches if the source is a loader."""
        if not self.is_open:
            self.open()
        command = self._answer() if not self._in_main else int(self._owner.board.head[_COMMAND])
        if command < _GO:
            return
        owner, unit = self._owner, self._owner.unit
        owner.pattern = pattern = _ORDER[command - _GO]
        ranks = owner.shard.world_size if pattern.ranks else 1
        own = (self._worker if pattern.workers else 0) * ranks + (owner.shard.rank if pattern.ranks else 0)
        readers = ranks * (max(1, owner.board.workers) if pattern.workers else 1)
        self._go_to(max(self.at, int(owner.board.head[_SKIP])))
        for number in count():
            if number % readers == own:
                items = self._next(unit)
                for item in items:
                    self.at += 1
                    yield item
            else:
                before = int(self.row[_READ_NS])
                items = self._next(unit)
                self.at += len(items)
                self.row[_OTHERS_NS] += int(self.row[_READ_NS]) - before
            if len(items) < unit:
                return

    def _go_to(self, begin: int) -> None:
        """Read and drop samples up to the position where the pass begins."""
        unit, self.at = self._owner.unit, begin
        while (here := self.read - len(self._ahead)) < begin:
            if not self._next(min(unit - here % unit, begin - here)):
                if self._owner.board.head[_STRICT]:
                    raise DataError(
                        f"{self._owner.name} ended after {here} samples, but is to resume after {begin}. Resume with "
                        "the same data, or from the end of an epoch"
                    )
                return

    # ---- comparing the first samples

    def read_first(self, most: int) -> None:
        """Read whole blocks until there are `most` samples, and write their digests to the table."""
        until = time.monotonic() + _PATIENCE_S.get(most, 2.0)
        if not self.is_open:
            self.open()
        row = self.row
        while len(self._ahead) < most and not self.ended and self._bytes < _MOST_BYTES and time.monotonic() < until:
            items = self._fetch(self._owner.unit)
            self._ahead += items
            self._bytes += sum(map(_bytes, items))
            for item in items[: COMPARED - int(row[_COUNT])]:
                row[_DIGESTS + int(row[_COUNT])] = mark_of(item)
                row[_COUNT] += 1
        row[_ENDED] = self.ended
        row[_PHASE] = most

    def _answer(self) -> int:
        """Follow the main process's commands in a worker, until it decides which samples each reader gets."""
        head, command = self._owner.board.head, _WAIT
        while command in _ASKED:
            if command > int(self.row[_PHASE]):
                self.read_first(command)
            time.sleep(_LOOK_EVERY_S)
            command = int(head[_COMMAND])
        return command

    def state_dict(self) -> StateDict:
        """Return a state of the stream, and the number of samples that were read before this state."""
        if self._ahead or self._stateful is None:
            return {**copy.deepcopy(self._first_state), "at": self.at}
        return {"read": self.read, "inner": copy.deepcopy(self._stateful.state_dict()), "at": self.at}


class DividedDataset(IterableDataset[Any]):
    """A reader's part of a stream; if nothing is divided, the wrapped data set itself.

    Args:
        source: the user's data set, whose samples are divided; or a loader, whose batches are divided.
        unit: number of samples, or of a loader's batches, in a block.
        board: table that the readers of this process share.
        shard: rank and number of ranks that share the data.
        alone: whether `get_worker_info()` returns None in a worker, so that the data set does not divide itself.
        restored: result of `state_dict`, at which the next pass resumes; None: start from the beginning.
    """

    def __init__(
        self, source: Any, unit: int, board: _Board, shard: DataShard, alone: bool, restored: StateDict | None = None
    ) -> None:
        own = {"source": source, "unit": unit, "board": board, "shard": shard, "alone": alone, "restored": restored}
        self.__dict__.update(own, _dataset=source, reader=None, pattern=None, started=None)

    if TYPE_CHECKING:  # for type checkers, since `__init__` sets these attributes through `__dict__`
        source: Any
        unit: int
        board: _Board
        shard: DataShard
        alone: bool
        restored: StateDict | None
        reader: Any
        pattern: Pattern | None
        started: Any

    @property
    def name(self) -> str:
        return type(self.source).__name__

    def iterate(self) -> Iterator[Any]:
        """Iterate over the source again; if it is a loader, start its workers so that they ignore signals."""
        iterator, self.started = start_workers(self.source)
        return iterator

    def __iter__(self) -> Iterator[Any]:
        self.reader = _Reader(self)
        return self.reader.units()

    def state_dict(self) -> StateDict:
        """Return a state of the stream from which any rank can continue."""
        if self.reader is not None and self.reader.is_open:
            return self.reader.state_dict()
        return copy.deepcopy(self.restored) or {"read": 0, "inner": None, "at": 0}

    def load_state_dict(self, state: StateDict) -> None:
        """Start the next pass from a state."""
        self.restored = copy.deepcopy(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.source, name, value)  # a worker_init_fn may set attributes, which the user's data set must get

    def __reduce__(self) -> tuple[Any, ...]:
        return DividedDataset, (self.source, self.unit, self.board, self.shard, self.alone, self.restored)


class Division:
    """A loader's stream, divided among the readers that read it in the same order.

    Args:
        loader: a plain `DataLoader` or torchdata's over iterable data, or any other iterable of batches.
        shard: rank and number of ranks that share the data.
        ask: whether the readers are compared. False: they are assumed to read the same samples, and in a worker
            `get_worker_info()` returns None, so that the data set does not divide itself.

    Attributes:
        pattern: which readers read the same samples; None if that is not known yet.
        unit: number of samples in a block; 1 if whole batches are divided, so that a block is one batch.
        loader: loader of this rank's batches.
        started: the iterator whose workers `end_workers` ends; None if there are no workers.
    """

    def __init__(self, loader: Any, shard: DataShard, ask: bool = True) -> None:
        by_samples = gives_samples(loader)
        self.shard, self._name = shard, described(loader)
        self.workers: int = loader.num_workers if by_samples else 0
        self.unit: int = (loader.batch_size or 1) if by_samples else 1
        self.pattern = None if ask and shard.world_size * max(1, self.workers) > 1 else _ORDER[0]
        self._compared = COMPARED if by_samples else AT_FIRST
        self._board = _Board(self.workers)
        source = loader.dataset if by_samples else loader
        self._stream = DividedDataset(source, self.unit, self._board, shard, alone=not ask)
        self.loader: Any = self._stream
        if by_samples:
            options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            self.loader = rebuild(loader, type(loader), dataset=self._stream, **options)
        self.drops_last: bool = by_samples and loader.drop_last
        self.started: Any = None
        self._is_timed = True
        self._waited_s = self._began_s = 0.0

    @property
    def is_common(self) -> bool:
        """Whether positions count in one order that all ranks and workers share; False until that is known."""
        return self.pattern is not None and self.pattern.common

    @property
    def name_of_pattern(self) -> str | None:
        """Name of the pattern, which is stored in a state."""
        return None if self.pattern is None else list(PATTERNS)[_ORDER.index(self.pattern)]

    @property
    def stateful(self) -> Stateful | None:
        """Object that has a state and not only a position: this object, torchdata's loader, or None."""
        if self.workers and not self.is_common:
            return self.loader if isinstance(self.loader, Stateful) else None
        asked = not self.workers or isinstance(self.loader, Stateful)
        return self if asked and isinstance(self._stream.source, Stateful) else None

    def state_dict(self) -> StateDict:
        """Return a state of the stream at a position that no rank has passed.

        With workers, return the state of the worker that has read most, so that few samples must be read again.
        """
        if not self.workers:
            return self._stream.state_dict()
        return max(_states_in(self.loader.state_dict()), key=lambda state: state["read"], default={})

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load into the data set a state that was saved after the last batch of an epoch; with workers, do nothing."""
        inner = state_dict.get("inner")
        if inner is not None and not self.workers:
            self._stream.source.load_state_dict(copy.deepcopy(inner))

    # ---- a pass over the stream

    def start(self, seed: int, place: tuple[int, int], restored: StateDict | None) -> Iterator[Any]:
        """Start the readers of a pass; they wait until `settle` is called.

        Args:
            seed: seed of the data.
            place: pair of epoch and cycle (restarts of the data within the epoch).
            restored: result of `state_dict` at which to resume.
        """
        head = [_WAIT, seed >> 32, seed & 0xFFFFFFFF, *place, 0, 0]
        self._board.head.copy_(torch.tensor(head, dtype=torch.int64))
        self._board.rows.zero_()
        self._stream.restored, self._stream.pattern = restored or None, self.pattern
        if self.loader is self._stream:
            iterator = iter(self._stream)
        else:
            iterator, self.started = start_workers(self.loader)
        if self.workers:
            self._stream.restored = None
        self._iterator, self._waited_s, self._began_s = iterator, 0.0, time.perf_counter()
        return self._timed(iterator) if self._is_timed else iterator

    def settle(self, begin: Callable[[Pattern], int], strict: bool, read: int) -> Pattern:
        """Find out which readers read the same samples, if `pattern` is None, and let the readers start.

        All ranks must call this if `pattern` is None.

        Args:
            begin: function that returns the index of the sample with which the pass begins. If there is no common
                order, the index counts in each reader's own order.
            strict: whether it is an error if the stream ends before that sample.
            read: index of the sample at which the readers are now.

        Raises:
            DataError: it cannot be found out which readers read the same samples.
        """
        if self.pattern is None:
            self.pattern = self._compare()
        skip = begin(self.pattern)
        if skip - read > self.unit * self.shard.world_size and self.shard.rank == 0:
            self._tell_of_reading(skip - read)
        if not self.workers and not self._stream.reader.is_open:
            self._stream.reader.open()
        head = self._board.head
        head[_SKIP], head[_STRICT] = skip, strict
        head[_COMMAND] = _GO + _ORDER.index(self.pattern)
        if self.loader is self._stream:
            self.started = self._stream.started
        return self.pattern

    def give_up(self) -> None:
        """End the readers that are still waiting."""
        if int(self._board.head[_COMMAND]) in _ASKED:
            self._board.head[_COMMAND] = _GIVE_UP

    def _timed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited_s += time.perf_counter() - began
            yield batch

    def end_pass(self) -> None:
        """Warn once, on rank 0, that all ranks read the whole stream, if that takes a notable part of a pass's time."""
        if not self._is_timed or self.pattern is None:
            return
        self._is_timed, ranks = False, self.shard.world_size if self.pattern.ranks else 1
        took_s = time.perf_counter() - self._began_s
        others_s = min(int(self._board.rows[:, _OTHERS_NS].max()) / 1e9, self._waited_s)
        if self.shard.rank == 0 and ranks > 1 and others_s > max(_COSTS_S, _COSTS * took_s):
            warn_user(
                f"each rank reads the whole {self._name}, {ranks} times what it uses: about {others_s:.0f} s of the "
                f"{took_s:.0f} s that the pass took. Let the data set give each rank a part of its own, by "
                "PartialState().process_index, or let rank 0 read for all: streams='dispatch'"
            )

    def _tell_of_reading(self, left: int) -> None:
        self._first(AT_FIRST)  # reads some samples, and so measures how long reading takes
        timed = [(int(row[_READ_NS]), int(row[_COUNT])) for row in self._board.rows if row[_COUNT]]
        seconds = max((took / samples for took, samples in timed), default=0.0) * left / 1e9
        what = "samples" if self.loader is not self._stream else "batches"
        warn_user(
            f"{self._stream.name} cannot say where it stands: {left:,} {what} are read again and thrown away to "
            f"resume, about {seconds:.0f} s. Give the data set or loader state_dict and load_state_dict (with "
            "workers: use torchdata's StatefulDataLoader)"
        )

    # ---- comparing the first samples of all readers

    def _first(self, most: int) -> list[_First]:
        """Return the first samples of this process's readers, at most `most` from each; wait for the workers."""
        rows = self._board.rows
        if not self.workers:
            self._stream.reader.read_first(most)
        else:
            self._board.head[_COMMAND] = most
            while int(rows[:, _PHASE].min()) < most:
                self._check_workers()
                time.sleep(_LOOK_EVERY_S)
        return [_First(row[_DIGESTS : _DIGESTS + int(row[_COUNT])].tolist(), bool(row[_ENDED])) for row in rows]

    def _check_workers(self) -> None:
        """Raise the error of a worker that failed before it read anything."""
        if not self.started._data_queue.empty():  # no batch was requested yet, so the queue can only hold an error
            self.give_up()
            for _ in self._iterator:
                pass
        if not all(worker.is_alive() for worker in self.started._workers):
            raise RuntimeError("a DataLoader worker ended before it had read a sample")

    def _everyone(self, most: int) -> list[list[_First]]:
        """Return the first samples of each rank's readers; all ranks must call this."""
        mine, error = [], None
        try:
            mine = self._first(most)
        except Exception as caught:  # noqa: BLE001  raised below, on all ranks
            error = caught
        if self.shard.world_size == 1 or not dist.is_initialized():
            if error is not None:
                raise error
            return [mine]
        raise_together(error, "reading the first samples")
        return list(dict(gather_object((self.shard.rank, mine))).values())

    def _compare(self) -> Pattern:
        everyone = self._everyone(AT_FIRST)
        if len({len(readers) for readers in everyone}) > 1:
            raise DataError(f"the ranks have different num_workers in their {self._name}. Give all as many")
        if any(0 in one.digests for one in chain(*everyone)):
            if self.shard.rank == 0:
                warn_user(
                    f"the samples of the {self._name} cannot be compared, so nobody knows whether ranks or workers "
                    "read the same ones: each gives what it reads. Say what is meant: streams='divide' (all read the "
                    "same, and each gives its part), 'dispatch' (rank 0 reads for all) or 'as_is'"
                )
            return PATTERNS["nothing"]
        if _alike(list(chain(*everyone))):
            return PATTERNS["ranks and workers"]
        everyone = self._everyone(self._compared)
        by_worker = list(zip(*everyone, strict=True))
        if all(map(_alike, by_worker)) and _apart([readers[0] for readers in by_worker]):
            return PATTERNS["ranks"]
        if all(map(_alike, everyone)) and _apart([readers[0] for readers in everyone]):
            return PATTERNS["workers"]
        if _apart(list(chain(*everyone))):
            return PATTERNS["nothing"]
        raise DataError(
            f"ranks or workers read some of the same samples of the {self._name}, but not in the same order, so they "
            "cannot be divided without losing or repeating some: as where each rank shuffles by a generator of its "
            "own. Let the data set give each rank a part of its own, or the same samples in the same order to all. Or "
            "say what is meant: streams='dispatch' (rank 0 reads for all), 'divide' (all read the same, whatever it "
            "looks like, and each gives its part) or 'as_is' (each rank gives all that it reads)"
        )


class _First(NamedTuple):
    """Digests of a reader's first samples, and whether the stream ended after them."""

    digests: list[int]
    ended: bool


def gives_samples(loader: Any) -> bool:
    """Return True if a loader's samples can be divided; of any other loader, whole batches are divided."""
    known = type(loader) is DataLoader or type(loader).__module__.startswith("torchdata.stateful_dataloader")
    return known and isinstance(loader.dataset, IterableDataset)


def by_shards(loader: Any, shard: DataShard) -> Any | None:
    """Return a loader over a rank's own files of a Hugging Face stream; None for any other data.

    Each rank then reads only what it uses. But positions belong to each rank's own files, so they are valid for this
    number of ranks only.
    """
    dataset: Any = loader.dataset if gives_samples(loader) else None
    if not type(dataset).__module__.startswith("datasets.") or getattr(dataset, "_distributed", None) is not None:
        return None
    if shard.world_size == 1 or dataset.num_shards % shard.world_size:
        return None
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    part = split(dataset, rank=shard.rank, world_size=shard.world_size)
    return rebuild(loader, type(loader), dataset=part, batch_size=loader.batch_size, drop_last=loader.drop_last)


def _alike(readers: Sequence[_First]) -> bool:
    """Return True if all readers start with the same samples.

    Only as many samples are compared as every reader has read. Return False if a reader has ended before another one,
    or if a reader has read nothing and another one has.
    """
    shortest, longest = (of(len(one.digests) for one in readers) for of in (min, max))
    ends = any(one.ended and len(one.digests) < longest for one in readers)
    heads = {tuple(one.digests[:shortest]) for one in readers}
    return len(heads) == 1 and not ends and (shortest > 0 or longest == 0)


def _apart(readers: Sequence[_First]) -> bool:
    """Return True if no two readers share samples, apart from samples that occur several times in the data."""
    sets = [set(one.digests) for one in readers]
    return all(_SHARED * len(one & other) <= min(len(one), len(other)) for one, other in combinations(sets, 2))


def _states_in(state: Any) -> Iterator[StateDict]:
    """Yield the readers' states inside a state of torchdata's loader."""
    if isinstance(state, dict):
        if state.keys() == {"read", "inner", "at"}:
            yield state
        else:
            for value in state.values():
                yield from _states_in(value)


def _bytes(sample: Any) -> int:
    """Estimate the bytes of memory of a sample."""
    return sum(
        len(leaf) if isinstance(leaf, (str, bytes)) else getattr(leaf, "nbytes", 8) for _, leaf in iter_leaves(sample)
    )
