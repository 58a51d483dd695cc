"""`IndexLoader`: loads a map-style data set by indices that instep chooses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, _utils

from instep.data.base import DataShard, PreparedLoader
from instep.data.foreign_sampler import ForeignOrder, is_distributed, order_digest
from instep.data.plan import Plan, Share
from instep.data.sampler import ShardedSampler
from instep.data.seeding import SeededDataset, add_note, load_each, seeded
from instep.data.workers import INIT_RAISED, end_workers, start_workers
from instep.distributed import gather_object
from instep.distributed.nested import iter_leaves
from instep.errors import DataError
from instep.types import StateDict
from instep.utils.seed import derive_seed

_KEPT = (
    "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


def rebuild(loader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, **changes: Any) -> DataLoader[Any]:
    """Make a new loader with the options of another loader.

    Args:
        loader: a plain `DataLoader`, not of a subclass.
        kind: class of the new loader: `DataLoader`, or a class that takes the same options.
        **changes: options to change. Options that form batches (`batch_size`, `sampler`, `batch_sampler`, `drop_last`)
            are not copied, so they must be given.
    """
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return kind(**{**options, **changes})


class IndexLoader(PreparedLoader):
    """Batches of a map-style data set, loaded with the user's `DataLoader` options and instep's indices.

    Without workers this class collates the batches itself, since a `DataLoader` would take 15 us more per batch.

    Args:
        loader: a plain `DataLoader`; its data set, collation and worker options are used.
        sampler: this rank's share of the indices.
        shard: the rank whose batches these are.
        drawn: order of the user's sampler; None for an order of instep.
        shared: whether the ranks divide one common order; if False, each rank has an order of its own.
        peers_even: if ranks have orders of their own: whether all ranks have the same number of samples per epoch and
            per step.
        peers: if ranks have orders of their own: number of samples per epoch and per step of each rank, if known.
        single: whether each index is a batch by itself.
        seed_samples: whether to seed random augmentation by sample index.
        pin: whether to put batches into pinned memory.
        frozen: whether every epoch repeats the first one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: ShardedSampler,
        shard: DataShard,
        *,
        drawn: ForeignOrder | None,
        shared: bool,
        peers_even: bool,
        peers: Sequence[tuple[int, int]],
        single: bool,
        seed_samples: bool,
        pin: bool,
        frozen: bool,
    ) -> None:
        super().__init__(loader, shard, frozen=frozen)
        self.sampler = sampler
        self.batch_size = getattr(sampler, "batch_size", None)
        self.seed_samples = seed_samples
        self._drawn = drawn
        self._ordered: Any = self.dataset if drawn is None and hasattr(self.dataset, "_instep_order_of") else None
        self._shared = shared
        self._peers = 1 if shared else self.world_size
        self._peers_even = peers_even
        self._sizes_of_peers = () if peers_even else tuple(peers)
        self._distributed = drawn is not None and is_distributed(drawn.sampler)
        stateful = drawn is not None and drawn.stateful is not None
        # without `even`, each rank ends with its own data, so ranks with unequal data have different positions
        apart = not (sampler.even or peers_even)
        self.rank_state = not shared and (stateful or apart)
        self._single = single
        self._pin = pin
        self._workers: DataLoader[Any] | None = None
        self._started: Any = None  # iterator with workers: of this pass, or of all passes if workers persist
        self._generator = torch.Generator()

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            sampler, first = self.sampler, self.first_batch
            known = self._peers_even or not sampler.counted
            even = first + (sampler.even_steps if known else len(sampler))
            if self._sizes_of_peers:
                same = len({size for _, size in self._sizes_of_peers}) == 1
                full = min(length // size for length, size in self._sizes_of_peers)
                even = max(first, min(even, full)) if same else first
            self._plan = Plan(
                first,
                first + len(sampler),
                uniform_until=even,
                total_is_final=True,
                longest_total=first + sampler.steps,
                share_of=self._share_of,
            )
        return self._plan

    @property
    def epoch_batches(self) -> int | None:
        # a pass that was resumed in the middle of a step may have a different number of steps than other passes
        moved = self.sampler.cursor % self.sampler.per_step
        return self.sampler.steps_of(self.sampler.end) if moved else self.num_batches

    def _enter(self, epoch: int, cycle: int) -> None:
        super()._enter(epoch, cycle)
        self.sampler.set_epoch(*((0, 0) if self.frozen else (epoch, cycle)))

    def reseed(self, seed: int) -> None:
        self.seed = self.sampler.seed = seed
        self._plan = None

    def start_at(self, batches: int) -> None:
        self._enter(self.epoch, self.cycle)
        batches = min(batches, self.sampler.steps)
        self._move(batches, min(batches * self.sampler.per_step, self.sampler.end))

    def start_before(self) -> None:
        stop = self.sampler.cursor
        self.start_at(0)
        self.sampler.stop = stop

    def _move(self, first_batch: int, cursor: int) -> None:
        self._begin(first_batch)
        self.sampler.cursor = cursor
        self._pending = True

    def _share_of(self, batch_idx: int) -> Share:
        """Return the share of a batch (samples of this rank and of all), without `last`.

        After the end of the data both numbers are 0.
        """
        local, total = self.sampler.samples(batch_idx - self.first_batch)
        units = (local, total * self._peers) if self._peers_even else None
        if self._sizes_of_peers and (total or not self.sampler.even):
            left = ((length - batch_idx * size, size) for length, size in self._sizes_of_peers)
            units = local, sum(max(0, min(rest, size)) for rest, size in left)
        if not self.sampler.counted:
            return Share(None if local else 0, None, False, units)
        return Share(local, None if units is None else units[1], False, units)

    def sample_indices(self, batch_idx: int) -> list[Any]:
        indices = self.sampler.indices(batch_idx - self.first_batch)
        return [indices] if self._single else list(indices)

    def state_dict(self, batches_done: int) -> StateDict:
        sampler = self.sampler
        finished = batches_done >= len(self)
        units = sampler.cursor + (batches_done - self.first_batch) * sampler.per_step
        state: StateDict = {
            "kind": "index",
            "unit": type(sampler).__name__,
            "epoch": self.epoch,
            "cycle": self.cycle,
            "seed": self.seed,
            "batches": batches_done,
            "done": sampler.end if finished else min(units, sampler.end),
            "length": sampler.length,
            "finished": finished,
            "shuffle": getattr(sampler, "shuffle", None),
            "world_size": self.world_size,
            "step_size": self._step_size,
        }
        if self._drawn is not None and self._drawn.state_before is not None:
            state["sampler"] = self._drawn.state_before
        if self._ordered:
            state["data"] = self._ordered._instep_order_mark(sampler.epoch)
        return state

    def load_state_dict(self, state: StateDict) -> None:
        sampler = self.sampler
        self._check_state(state)
        if self._drawn is not None and self._drawn.stateful is not None and "sampler" in state:
            self._drawn.stateful.load_state_dict(state["sampler"])
            sampler.redraw()
        if self._ordered and state["done"] and not state["finished"]:
            self._ordered._instep_go_on(state.get("data"), 0 if self.frozen else state["epoch"])
            sampler.redraw()
        self.reseed(state["seed"])
        self._enter(state["epoch"], state["cycle"])
        if state["finished"]:
            self._move(len(sampler), sampler.end)
            return
        done: int = state["done"]
        if not self._shared and done:
            done = self._own_position(state)
        elif done and (done > sampler.length or (self._drawn is None and state["length"] != sampler.length)):
            raise DataError(
                f"the data set has {sampler.length} samples or batches now; it had {state['length']} when the "
                f"checkpoint was taken after {done} of them. Resume with the same data, or from the end of an epoch"
            )
        self._move(done // sampler.per_step, done)

    @property
    def _step_size(self) -> int:
        """Units that all ranks together take in a step: samples, or batches if their size is not known."""
        size = self.loader.batch_size if self._distributed else None
        return self.sampler.per_step * self._peers * (size or 1)

    def _own_position(self, state: StateDict) -> int:
        """Return this rank's position in its own order, computed from a saved state."""
        if not self._distributed:
            if state["world_size"] != self.world_size:
                raise DataError(
                    f"the checkpoint was taken within an epoch by {state['world_size']} processes, now there are "
                    f"{self.world_size}, and instep does not know how the data is spread over them "
                    "(use_distributed_sampler=False). Resume with as many processes, or from the end of an epoch"
                )
            return state["done"]
        everyone = state["batches"] * state["step_size"]
        if everyone % self._step_size:
            raise DataError(
                f"{everyone} samples of the epoch are done, which is no whole number of steps of {self._step_size} "
                "now. A sampler that shards by itself can resume only where both agree: use the checkpoint's number "
                "of processes and batch size, or let instep shard the data"
            )
        return everyone // self._step_size * self.sampler.per_step

    def _check_state(self, state: StateDict) -> None:
        if state.get("kind") != "index" or state["unit"] != type(self.sampler).__name__:
            raise DataError(
                f"the checkpoint's data position is of another kind of loader ({state.get('kind')!r}, "
                f"{state.get('unit')!r}). Resume with the loader it was taken with, or from the end of an epoch"
            )
        shuffle = getattr(self.sampler, "shuffle", None)
        if shuffle != state["shuffle"] and state["done"] and not state["finished"]:
            raise DataError(
                f"the loader has shuffle={shuffle}, the checkpoint was taken within an epoch of shuffle="
                f"{state['shuffle']}. Resume with the same setting, or from the end of an epoch"
            )

    def __iter__(self) -> Iterator[Any]:
        self._start_pass()
        if self._drawn is not None and self._shared and self.world_size > 1:
            self._check_order()
        steps = len(self.sampler)
        if not steps:
            return
        batches = self._open()
        started = self._started
        try:
            first, last = self.first_batch, self.first_batch + steps - 1
            even = min(first + self.sampler.even_steps, last)
            self.share = self._share_of(first)
            yield from islice(batches, even - first)
            for number in range(even, last + 1):
                self.share = self._share_of(number)._replace(last=number == last)
                yield next(batches)
        except Exception as error:
            self._name_batch(error, started)
            from instep.data.read_errors import explain  # imported late: used only for an error

            cause = explain(error, started)
            if started is self._started:
                self.close()
            if cause is not None:
                raise cause from error
            raise
        finally:
            if not self.loader.persistent_workers:
                end_workers(started)

    def _check_order(self) -> None:
        digests = gather_object(order_digest(self.sampler.order))
        if len(set(digests)) > 1:
            others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            raise DataError(
                f"the sampler {type(self.loader.sampler).__name__} gives rank {others[0]} another order than rank 0, "
                "so samples would be repeated and lost. Let it draw from torch's, python's or numpy's global "
                "generators, which instep seeds alike on all ranks, or from a generator with a fixed seed"
            )

    def _open(self) -> Iterator[Any]:
        """Return an iterator over the remaining batches of the pass, with or without workers."""
        if self.loader.num_workers == 0:
            return map(self._fetch(), self._indices())
        if self._workers is None:
            self._workers = self._with_workers()
        if not self.loader.persistent_workers:
            end_workers(self._started)  # a pass that was left early may still have workers
        self._generator.manual_seed(derive_seed(self.seed, "workers", self.epoch, self.cycle, self.rank))
        batches, started = start_workers(self._workers)
        if started is not None:
            self._started = started
        return batches

    def _indices(self) -> Iterator[Any]:
        """Return this rank's batches of indices, with seeds if loading them needs seeds."""
        if not self.seed_samples and self.loader.num_workers == 0:
            return iter(self.sampler)
        place = ("sample",) if self.seed_samples else ("batch", self.rank)
        parts = (self.seed, *place, self.epoch, self.cycle)
        indices = iter(self.sampler)
        return seeded(indices, *parts, first=self.first_batch, per_sample=self.seed_samples, single=self._single)

    def _fetch(self) -> Callable[[Any], Any]:
        """Return the function that loads a batch from its indices in this process, without workers."""
        collate = self.loader.collate_fn
        dataset: Any = SeededDataset(self.dataset, restore=True) if self.seed_samples else self.dataset
        load: Callable[[Any], Any] = getattr(dataset, "__getitems__", None) or partial(load_each, dataset)

        def fetch_one(index: Any) -> Any:
            return collate(dataset[index])

        def fetch_batch(indices: Any) -> Any:
            try:
                return collate(load(indices))
            except Exception as error:
                add_note(error, f"The batch has the samples {list(indices)}.")
                raise

        fetch = fetch_one if self._single else fetch_batch
        if self._pin and torch.accelerator.is_available():
            return lambda indices: _pinned(fetch(indices))
        return fetch

    def _with_workers(self) -> DataLoader[Any]:
        indices = _Indices(self)
        batching: dict[str, Any] = (
            {"sampler": indices, "batch_size": None} if self._single else {"batch_sampler": indices}
        )
        return rebuild(
            self.loader,
            dataset=SeededDataset(self.dataset, restore=False),
            generator=self._generator,  # without `generator`, iterating would draw from the training's generator
            pin_memory=self._pin,
            **batching,
        )

    def _name_batch(self, error: Exception, started: Any) -> None:
        """Add a note with the number and samples of the batch to an error that was raised in a worker."""
        text = str(error)
        if started is None or not text.startswith("Caught ") or INIT_RAISED in text:
            return
        if not getattr(self.loader, "in_order", True):
            return
        batch_idx = self.first_batch + started._rcvd_idx - 1
        add_note(error, f"Batch {batch_idx} of epoch {self.epoch} has the samples {self.sample_indices(batch_idx)}.")

    def close(self) -> None:
        end_workers(self._started)
        self._workers = self._started = None


def _pinned(batch: Any) -> Any:
    """Copy a batch into pinned memory.

    A batch with a tensor on a device is returned unchanged, since torch cannot pin it.
    """
    if any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for _, leaf in iter_leaves(batch)):
        return batch
    return _utils.pin_memory.pin_memory(batch)


class _Indices:
    """Sampler that yields the indices for worker processes. It is used only in the main process."""

    def __init__(self, source: IndexLoader) -> None:
        # a weak reference makes no cycle, so worker processes end when the source is freed
        self._source = weakref.proxy(source)

    def __iter__(self) -> Iterator[Any]:
        return self._source._indices()

    def __len__(self) -> int:
        return len(self._source.sampler)
