"""`CombinedLoader`: several loaders that are read as one."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from instep.data.base import BatchSource, PreparedLoader
from instep.data.config import resolve_limit
from instep.data.loader import prepare_loader
from instep.data.plan import Plan, Share
from instep.distributed.nested import find_batch_size, iter_leaves, map_leaves
from instep.errors import DataError, SettingError
from instep.types import StateDict
from instep.utils.seed import derive_seed

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


class _Track:
    """Position of one loader within a combined pass. A "run" is one reading of the loader, from its start to its end.

    Attributes:
        began: index of the combined batch with which the loader's current run began; -1 before its first run.
        at: index, among the loader's own batches, of the first batch of its current run.
        run_end: combined batches done when the loader's run ended; None while the run goes on.
        ended_at: combined batches done when the loader was first exhausted; None if it was not.
        cycle: how often the loader was restarted.
        before: states of the loader at the last batches of its previous run; the key is the combined batches done.
    """

    def __init__(self, source: BatchSource) -> None:
        self.source = source
        self.iterator: Iterator[Any] = iter(())
        self.began = -1
        self.at = 0
        self.run_end: int | None = None
        self.ended_at: int | None = None
        self.cycle = 0
        self.before: dict[int, StateDict] = {}

    def own(self, batches: int) -> int:
        """Return how many of the loader's own batches are done in its current run."""
        return self.at + max(0, min(batches, sys.maxsize if self.run_end is None else self.run_end) - self.began)

    def start(self, number: int) -> None:
        """Begin a run of the loader with the combined batch `number`."""
        self.began, self.at, self.run_end = number, self.source.first_batch, None
        self.iterator = iter(self.source)


class CombinedLoader(BatchSource):
    """Batches of several loaders together: a dict of loaders yields dicts of batches, and a list yields lists.

    The Trainer prepares the loaders for their ranks. If you iterate a `CombinedLoader` yourself, they are prepared as
    for one process. The weights of ranks, and of the batches in an accumulation window, follow from their numbers of
    samples, summed over all loaders.

    Args:
        iterables: loaders in dicts, lists and tuples at any depth. A list of plain numbers or texts is itself a loader,
            and so is an empty list inside another collection.
        mode: "min_size" stops with the shortest loader. "max_size_cycle" stops with the longest and restarts the
            others, shuffled anew. "max_size" stops with the longest and yields None for the others. "sequential" reads
            one loader after the other and yields (batch, batch_idx, dataloader_idx).

    Attributes:
        flattened: all loaders, as a list.
        limits: largest number of batches of each loader: one number for all, a list with one for each, or None. The
            pass is as long as with loaders of these lengths. In mode "sequential" each loader ends at its limit.
            Limits of the Trainer apply too.

    Raises:
        SettingError: the mode is unknown.
        DataError: there is no loader, or a loader is None.

    Example:
        >>> combined = CombinedLoader({"a": range(3), "b": range(10, 12)})
        >>> list(combined)
        [{'a': 0, 'b': 10}, {'a': 1, 'b': 11}]
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise SettingError(f"Unsupported mode {mode!r}. Use one of: {', '.join(MODES)}.", field="mode", got=mode)
        super().__init__()
        self.iterables = iterables
        self.mode = mode
        self._loaders: list[Any] = []
        self._places = _places(iterables, self._loaders)
        if not self._loaders:
            raise DataError("CombinedLoader got no loader: give at least one, in a dict, list or tuple")
        if any(loader is None for loader in self._loaders):
            raise DataError("CombinedLoader got None in place of a loader: leave it out of the collection")
        self._sources: list[BatchSource] = []
        self._limits: list[int | float] | None = None
        self._limit: int | None = None
        self._tracks: list[_Track] = []
        self._pass: object = None  # the newest pass
        self._finished = False

    def map(self, function: Callable[[Any], BatchSource]) -> CombinedLoader:
        """Return the same combination with `function(loader)`, such as a prepared loader, in place of each loader.

        Each loader after the first gets a seed of its own, so that two loaders of equal length are shuffled
        differently.
        """
        combined = CombinedLoader(map_leaves(lambda place: function(self._loaders[place]), self._places), self.mode)
        combined.limits = self._limits
        for index, loader in enumerate(combined.flattened):
            if index and isinstance(loader, PreparedLoader):
                loader.reseed(derive_seed(loader.seed, "loader", index))
        return combined

    def prepared_one_by_one(
        self, prepare: Callable[[Any, str, int | float, None], BatchSource], stage: str, limit: int | float
    ) -> list[BatchSource]:
        """Prepare the loaders, each within its own limit and the limit of the stage."""
        sources = [prepare(loader, stage, limit, None) for loader in self._loaders]
        for index, most in enumerate(self._limits or ()):
            length = sources[index].num_batches
            if most != math.inf and (length is None or length > most):
                sources[index] = prepare(self._loaders[index], stage, int(most), None)
        return sources

    def limit(self, limit: int | float | None, name: str = "limit_train_batches") -> None:
        """Use at most this number of batches of an epoch, or this fraction of them."""
        self._ready()
        self._limit = self._plan = None
        # a claimed length is only an estimate: the data may have more batches, so an int limit does not depend on it
        claimed = not self.plan.total_is_final
        length = None if claimed and isinstance(limit, int) else self.num_batches
        batches = resolve_limit(limit, length, name)
        self._limit = None if batches in (math.inf, length) else int(batches)
        self._plan = None

    @property
    def flattened(self) -> list[Any]:
        """All loaders, in order: the user's loaders, or the loaders that replaced them in `map`."""
        return list(self._loaders)

    @property
    def limits(self) -> list[int | float] | None:
        """Largest number of batches from each loader, in order; None for no limits.

        It can be set to one number for all loaders, a list with one number for each loader, or None.
        """
        return None if self._limits is None else list(self._limits)

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        numbers = [limits] * len(self._loaders) if isinstance(limits, int | float) else limits
        if numbers is not None and len(numbers) != len(self._loaders):
            raise DataError(
                f"Mismatch in number of limits ({len(numbers)}) and number of iterables ({len(self._loaders)}): give "
                "one number for all, or one for each loader"
            )
        for number in numbers or ():
            if number < 0 or (number != math.inf and number != int(number)):
                raise DataError(
                    f"CombinedLoader.limits got {number}: they count batches, from 0 to inf. Fractions go to the "
                    "Trainer, as limit_train_batches=0.5"
                )
        self.reset()
        self._limits = None if numbers is None else list(numbers)
        self._sources, self._tracks, self._plan = [], [], None

    @property
    def sampler(self) -> Any:
        """Samplers of the loaders, in the same collection; None for a loader without a sampler."""
        return map_leaves(lambda place: getattr(self._loaders[place], "sampler", None), self._places)

    @property
    def batch_sampler(self) -> Any:
        """Batch samplers of the loaders, in the same collection; None for a loader without a batch sampler."""
        return map_leaves(lambda place: getattr(self._loaders[place], "batch_sampler", None), self._places)

    def reset(self) -> None:
        """Release worker processes and go back to the beginning of the epoch."""
        self.close()
        if self._tracks:
            self._enter(self.epoch, self.cycle)

    # ---- sizes and samples, which a loop reads

    @property
    def plan(self) -> Plan:
        self._ready()
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    @property
    def rank_state(self) -> bool:  # type: ignore[override]
        """Whether the state of a loader differs per rank."""
        self._ready()
        return any(track.source.rank_state for track in self._tracks)

    @property
    def reads_once(self) -> bool:
        self._ready()
        return any(source.reads_once for source in self._sources)

    def empty_parts(self) -> list[str]:
        self._ready()
        return [
            f"loader {self._name(track)}, {', '.join(track.source.empty_parts())}"
            for track in self._tracks
            if track.run_end == 0 or track.source.num_batches == 0
        ]

    def _name(self, track: _Track) -> str:
        """Return the keys that lead to a loader in the collection."""
        index = self._tracks.index(track)
        return next(path for path, place in iter_leaves(self._places) if place == index) or str(index)

    def sample_indices(self, batch_idx: int) -> list[Any] | None:
        """Return the sample indices of the current batch, with one entry per loader; None for an earlier batch."""
        if batch_idx != self._given - 1:
            return None
        return [
            track.source.sample_indices(track.own(batch_idx)) if _gives(track, batch_idx) else None
            for track in self._tracks
        ]

    # ---- preparing the loaders, and the first batch of a pass

    def _ready(self) -> None:
        """Prepare the loaders at first use, if they are not prepared yet."""
        if self._tracks:
            return
        self._sources = [self._prepared(index, loader) for index, loader in enumerate(self._loaders)]
        self._tracks = [_Track(source) for source in self._sources]
        self.world_size = self._sources[0].world_size

    def _prepared(self, index: int, loader: Any) -> BatchSource:
        limit = None
        if self.mode == "sequential" and self._limits is not None and self._limits[index] != math.inf:
            limit = int(self._limits[index])
        if not isinstance(loader, BatchSource):
            return prepare_loader(loader, limit=limit, seed=derive_seed(torch.initial_seed(), "loader", index))
        if limit is not None:
            raise DataError(
                f"CombinedLoader.limits cannot shorten loader {index}, which is prepared already; give its limit to "
                "prepare_loader"
            )
        return loader

    def set_epoch(self, epoch: int, cycle: int = 0) -> None:
        self._ready()
        super().set_epoch(epoch, cycle)

    def _enter(self, epoch: int, cycle: int) -> None:
        self.epoch, self.cycle = epoch, cycle
        self._pending = self._finished = False
        self._tracks = [_Track(source) for source in self._sources]
        for track in self._tracks:
            track.source.set_epoch(epoch, self._inner_cycle(track))
            track.source.start_at(0)
        self._begin(0)
        self._given = 0

    def start_at(self, batches: int) -> None:
        self._ready()
        self._enter(self.epoch, self.cycle)
        before = 0  # number of batches of all earlier loaders, in mode "sequential"
        for track in self._tracks:
            source, own = track.source, batches
            length = source.num_batches if source.plan.total_is_final else None
            if self.mode == "sequential":
                own = max(0, batches - before) if length is None else min(max(0, batches - before), length)
                before += length or own
            elif length is not None:
                if batches >= length:
                    track.ended_at = length
                own = min(batches, length)
                if self.mode == "max_size_cycle" and length:
                    track.cycle, own = divmod(batches, length)
                    source.set_epoch(self.epoch, self._inner_cycle(track))
            source.start_at(own)
            track.run_end = batches if length is not None and own >= length else None
        self._resume_at(batches)

    def _inner_cycle(self, track: _Track) -> int:
        # `self.cycle` counts restarts of this CombinedLoader by an outer one, and `track.cycle` restarts of one loader.
        # Each pair of these two counts must give a different result, since the shuffling depends on the result.
        return self.cycle * 1_000_003 + track.cycle

    def _resume_at(self, batches: int) -> None:
        self._begin(batches)
        self._given = batches
        self._pending = True

    def _make_plan(self) -> Plan:
        """Calculate the length of the pass from the positions of the loaders at its beginning."""
        plans = [source.plan for source in self._sources]
        final = all(plan.total_is_final for plan in plans)
        known = [number for track in self._tracks if (number := _left(track)) is not None]
        total, combine = None, {"sequential": sum, "min_size": min}.get(self.mode, max)
        lengths = [plan.total for plan in plans if plan.total is not None]
        # If a total is not final, estimate from the whole lengths, wherever the pass begins.
        if len(lengths) == len(plans) and not final:
            total = combine(lengths)
        elif final:
            running = [number for number, track in zip(known, self._tracks, strict=True) if track.ended_at is None]
            total = self.first_batch + (max(running, default=0) if combine is max else combine(known))
        if (most := self._most()) is not None:
            total = most if total is None else min(total, most)
        even = [0 if self.mode == "sequential" else sys.maxsize]
        even += [self.first_batch + plan.uniform_until - plan.first for plan in plans if not plan.uniform]
        if self.mode == "max_size":  # after a loader has ended, the batches have no samples of it
            even += [self.first_batch + number for number in known]
        if final and total is not None:
            even.append(total)
        alike = all(plan.alike for plan in plans)
        seen = self._seen_between
        return Plan(
            self.first_batch, total, uniform_until=min(even), total_is_final=final, alike=alike, sizes_seen=seen
        )

    def _most(self) -> int | None:
        """Return the largest number of batches in an epoch that the limits allow; None without a limit."""
        ends: list[int | float] = [math.inf if self._limit is None else self._limit]
        if self._limits is not None and self.mode != "sequential":
            lengths = [math.inf if source.num_batches is None else source.num_batches for source in self._sources]
            own = [min(pair) for pair in zip(lengths, self._limits, strict=True)]
            ends.append(min(own) if self.mode == "min_size" else max(own))
        return None if min(ends) == math.inf else int(min(ends))

    # ---- state

    def state_dict(self, batches_done: int) -> StateDict:
        self._ready()
        finished = self._finished or (self.share.last and batches_done >= self._given)
        return {
            "kind": "combined",
            "mode": self.mode,
            "epoch": self.epoch,
            "cycle": self.cycle,
            "batches": batches_done,
            "finished": finished,
            "loaders": [self._track_state(track, batches_done) for track in self._tracks],
        }

    def _track_state(self, track: _Track, batches_done: int) -> StateDict:
        ended = track.ended_at is not None and track.ended_at <= batches_done
        if batches_done < track.began and track.before:
            return {"cycle": track.cycle - 1, "ended": ended, "state": track.before[batches_done]}
        own = track.source.first_batch if track.began < 0 else track.own(batches_done)
        return {"cycle": track.cycle, "ended": ended, "state": track.source.state_dict(own)}

    def load_state_dict(self, state: StateDict) -> None:
        self._ready()
        loaders = state.get("loaders", ())
        if state.get("kind") != "combined" or state["mode"] != self.mode or len(loaders) != len(self._tracks):
            raise DataError(
                f"the checkpoint's data position is of another combination of loaders ({len(loaders)} in mode "
                f"{state.get('mode')!r}; here are {len(self._tracks)} in mode {self.mode!r}). Resume with the loaders "
                "it was taken with, or from the end of an epoch"
            )
        self._enter(state["epoch"], state["cycle"])
        for track, saved in zip(self._tracks, loaders, strict=True):
            track.cycle = saved["cycle"]
            track.source.load_state_dict(saved["state"])
            if saved["ended"]:
                track.ended_at = state["batches"]
            if saved["state"]["finished"]:
                track.run_end = state["batches"]
        self._finished = state["finished"]
        self._resume_at(state["batches"] if self._finished else self._resumed_batch())

    def _resumed_batch(self) -> int:
        """Return the index of the first batch of a resumed pass, counted in batches of the current number of ranks."""
        first = [track.source.first_batch for track in self._tracks]
        if self.mode == "sequential":
            return sum(first)
        if self.mode == "min_size":
            return min(first)
        running = [number for number, track in zip(first, self._tracks, strict=True) if track.ended_at is None]
        return running[0] if running else max(first)

    # ---- the pass

    def __iter__(self) -> Iterator[Any]:
        self._ready()
        self._start_pass()
        self._pass = this = object()
        end = self.plan.total if self.plan.total_is_final else self._most()
        if self._finished or (end is not None and self._given >= end):
            return
        for track in self._tracks:
            track.source.history = self.history
        try:
            yield from self._one_by_one() if self.mode == "sequential" else self._side_by_side()
        except Exception:
            self.close()  # close() also ends the workers of loaders that raised no error
            raise
        finally:
            if self._pass is this:  # no later pass has begun
                for track in self._tracks:
                    track.iterator = iter(())  # ends the pass of a loader that has batches left

    def _side_by_side(self) -> Iterator[Any]:
        most = self._most()
        for track in self._tracks:
            if track.run_end is None:
                track.start(self._given)
        while True:
            number = self._given
            batches = [self._next(track, number) for track in self._tracks]
            stopped = [batch is _END for batch in batches]
            if all(stopped) or (self.mode == "min_size" and any(stopped)):
                return
            if self.mode == "max_size_cycle" and any(stopped):
                name = self._name(self._tracks[stopped.index(True)])
                raise DataError(
                    f"loader {name} gives no batch: a loader without any batch cannot be cycled in mode "
                    "'max_size_cycle'. Leave it out, or use another mode"
                )
            if self.mode == "min_size":
                over = any(track.run_end is not None for track in self._tracks)
            else:
                over = all(track.ended_at is not None for track in self._tracks)
            given = [
                _counted(track.source, batch)
                for track, batch in zip(self._tracks, batches, strict=True)
                if batch is not _END
            ]
            self._give(_together(given, over or number + 1 == most))
            parts = [None if batch is _END else batch for batch in batches]
            yield map_leaves(parts.__getitem__, self._places)
            if self.share.last:
                return

    def _next(self, track: _Track, number: int) -> Any:
        if track.run_end is not None:
            if self.mode != "max_size_cycle":
                return _END
            self._again(track, number)
        batch = next(track.iterator, _END)
        if batch is _END or track.source.share.last:
            track.run_end = number + (batch is not _END)
            track.ended_at = track.run_end if track.ended_at is None else track.ended_at
        return batch

    def _again(self, track: _Track, number: int) -> None:
        """Restart an exhausted loader with another order."""
        source = track.source
        if track.began >= 0:
            nearest = range(max(track.began, number - self.history), number)
            track.before = {done: source.state_dict(track.own(done)) for done in nearest}
        track.cycle += 1
        source.set_epoch(self.epoch, self._inner_cycle(track))
        track.start(number)

    def _one_by_one(self) -> Iterator[Any]:
        for index, track in enumerate(self._tracks):
            if track.run_end is not None:
                continue
            track.start(self._given)
            while (batch := self._next(track, self._given)) is not _END:
                number = self._given
                later = any(other.source.num_batches != 0 for other in self._tracks[index + 1 :])
                last = (track.run_end is not None and not later) or number + 1 == self._limit
                self._give(track.source.share._replace(last=last))
                yield batch, track.own(number), index
                if self.share.last:
                    return

    def close(self) -> None:
        for source in self._sources:
            source.close()


_END = object()


def _places(nest: Any, loaders: list[Any], inside: bool = False) -> Any:
    """Add the loaders of a nested collection to a list; return the collection with list indices in place of loaders."""
    items = nest if isinstance(nest, list | tuple) else [None]
    plain = (inside or len(items) > 0) and all(isinstance(item, int | float | str) for item in items)
    if isinstance(nest, list | tuple) and not plain:
        values = [_places(item, loaders, inside=True) for item in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    if isinstance(nest, Mapping):
        places: Any = copy.copy(nest)  # copy the dict, so that a subclass of dict keeps its other attributes
        for key, value in nest.items():
            places[key] = _places(value, loaders, inside=True)
        return places
    loaders.append(nest)
    return len(loaders) - 1


def _gives(track: _Track, batch_idx: int) -> bool:
    return track.began >= 0 and (track.run_end is None or batch_idx < track.run_end)


def _left(track: _Track) -> int | None:
    """Count the batches that a loader has left at the beginning of a pass; None if unknown."""
    if track.run_end is not None:
        return 0
    length = track.source.num_batches
    return None if length is None else length - track.source.first_batch


def _counted(source: BatchSource, batch: Any) -> Share:
    """Return the `Share` of one loader's part of a batch: its numbers of samples on this rank and on all ranks.

    If the loader does not know these numbers and there is only one rank, count the samples of the batch.
    """
    share = source.share
    if share.mine is not None or source.world_size > 1:
        return share
    size = find_batch_size(batch)
    return share._replace(mine=size, all=size)


def _together(shares: Sequence[Share], last: bool) -> Share:
    """Return the `Share` of a combined batch: the sums of its loaders' numbers of samples."""
    units = [share.units for share in shares if share.units is not None]
    summed = (sum(own[0] for own in units), sum(own[1] for own in units)) if len(units) == len(shares) else None
    return Share(_sum([share.mine for share in shares]), _sum([share.all for share in shares]), last, summed)


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
