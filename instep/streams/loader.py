"""`DividedLoader`: divides a stream over ranks and workers, whose numbers may be different when a run is resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from instep.data.base import OWN_END, DataShard, described
from instep.data.seeding import RandomStream
from instep.data.stream import StreamLoader
from instep.errors import DataError
from instep.streams.divide import PATTERNS, Division, Pattern, by_shards, gives_samples
from instep.types import StateDict, Stateful


class DividedLoader(StreamLoader):
    """Batches of a stream without a reliable length, divided over ranks and workers if all read the same samples.

    A single process without workers iterates over the loader unchanged. It skips single samples only if it resumes from
    a position inside one of the loader's batches.

    Args:
        loader: a `DataLoader` over iterable data, or any other iterable of batches.
        shard: rank and number of ranks that share the data.
        ask: whether the readers are compared. False: they are assumed to read the same samples.
        sizes: function that gets whether the ranks divide the stream, and returns the estimated and the maximum length
            of the loader.
        uneven: what happens if each rank has batches of its own and one ends first, as in `StreamLoader`.
        stateful: the loader or data set with a state of its own; None if there is none.
        resumable: whether a run may resume within the data. If False, the stream's state is not copied at each batch.
        frozen: whether every epoch has the random numbers of the first epoch.
        rewinds: as in `StreamLoader`.
    """

    def __init__(
        self,
        loader: Any,
        shard: DataShard,
        *,
        ask: bool,
        sizes: Callable[[bool], tuple[int | None, int | None]],
        uneven: str,
        stateful: Stateful | None,
        resumable: bool,
        frozen: bool,
        rewinds: Stateful | None,
    ) -> None:
        self._division: Division | None = None
        estimate, limit = sizes(True)
        super().__init__(
            loader,
            shard,
            estimate=estimate,
            limit=limit,
            uneven=uneven,
            stateful=stateful,
            frozen=frozen,
            rewinds=rewinds,
        )
        self._ask, self._sizes, self._resumable = ask, sizes, resumable
        self._part = by_shards(loader, shard) if ask else None
        if self._part is not None:
            self._set_epochs.append(self._part.dataset.set_epoch)
            self.uneven = uneven if uneven == OWN_END else "join"
        self._unit: int = (loader.batch_size or 1) if (by_samples := gives_samples(loader)) else 1
        self._origin = 0  # position in the common order at which the pass began
        if shard.world_size > 1 or (by_samples and loader.num_workers):
            self._divide()

    def _divide(self) -> Division:
        shard = DataShard(self.rank, self.world_size, self.seed)
        whole = self.loader if self._part is None else self._part
        self._division = division = Division(whole, shard, self._ask)
        self.stateful = None
        if division.pattern is not None:
            self._adopt(division)
        return division

    def _adopt(self, division: Division) -> None:
        """Apply the pattern that the comparison of the readers found."""
        assert division.pattern is not None
        self.common = division.is_common
        self.stateful = division.stateful if self._resumable else None
        divided = division.pattern.ranks
        if divided and self.world_size > 1 and self.uneven != OWN_END:
            self.uneven = "stop" if division.drops_last else "join"
        self._set_ends(*self._sizes(divided))
        self._plan = None

    @property
    def _iterated(self) -> Any:
        return self.loader if self._division is None else self._division.loader

    @property
    def _step(self) -> int:
        """Number of samples that all ranks together take in a step; number of batches if whole batches are divided."""
        return self._unit * self.world_size

    @property
    def _has_positions(self) -> bool:
        return self.common or self._division is None

    @property
    def rank_state(self) -> bool:  # type: ignore[override]
        return not self._has_positions and super().rank_state

    # ---- saving and restoring the position

    def _enter(self, epoch: int, cycle: int) -> None:
        super()._enter(epoch, cycle)
        self._origin = 0

    def start_at(self, batches: int) -> None:
        super().start_at(batches)
        self._origin = batches * self._step

    def state_dict(self, batches_done: int) -> StateDict:
        state = super().state_dict(batches_done)
        state["divided"] = None if self._division is None else self._division.name_of_pattern
        state["workers"] = 0 if self._division is None else self._division.workers
        if self._has_positions:
            state["position"] = self._origin + (batches_done - self.first_batch) * self._step
        return state

    def load_state_dict(self, state: StateDict) -> None:
        position, division = state.get("position"), self._division
        within = state.get("kind") == "stream" and state["batches"] and not state["finished"]
        if position is not None and (
            division is not None or state["divided"] or position != state["batches"] * self._unit
        ):
            self._load_position(state)
            return
        if within and state["world_size"] != self.world_size:
            raise DataError(
                f"the checkpoint's data position was taken within an epoch by {state['world_size']} processes, each of "
                f"which read a part of its own of the {described(self.loader)}; now there are {self.world_size}. "
                "Resume with as many, or from the end of an epoch. A run that begins with streams='divide', where "
                "every process reads all the data, goes on with any number of them"
            )
        if within and division is not None:
            was = PATTERNS[state.get("divided") or "nothing"]
            if not was.workers and state.get("workers", division.workers) != division.workers:
                raise DataError(
                    f"the checkpoint's data position was taken within an epoch by {state['workers']} workers, each "
                    f"with its own part of the {described(self.loader)}; now there are {division.workers}. Resume with "
                    "as many, or from the end of an epoch"
                )
            division.pattern = was
            self._adopt(division)
        super().load_state_dict(state)
        self._origin = self.first_batch * self._step

    def _load_position(self, state: StateDict) -> None:
        """Go to a position in the common order; a run with different numbers of ranks and workers may have saved it."""
        division = self._division or self._divide()
        position: int = state["position"]
        found = division.pattern
        if found is not None and not found.common and position and not state["finished"]:
            raise self._reads_otherwise(found)
        self.seed = state["seed"]
        self._enter(state["epoch"], state["cycle"])
        inner = state.get("state")
        if inner is not None and state["divided"] is None:  # a single process has saved this state
            inner = {"read": position, "inner": inner, "at": position}
        self._resume_at({**state, "batches": -(-position // self._step), "own": None, "state": inner})
        self._origin = position
        if state["finished"]:
            division.load_state_dict(inner or {})

    def _reads_otherwise(self, found: Pattern) -> DataError:
        workers = "" if self._division is None else f" of {self._division.workers} workers each"
        ranks = "ranks" if not found.ranks else "workers"
        return DataError(
            f"the checkpoint's data position is one of a common order of all samples, but now the {ranks} read "
            f"parts of the {described(self.loader)} of their own ({self.world_size} ranks{workers}). Resume with the "
            "workers it was taken with, from the end of an epoch, or with streams='divide'"
        )

    # ---- a pass over the stream

    def _start(self, resume: StateDict, position: int) -> None:
        division = self._division
        if division is None:
            super()._start(resume, position)
            return
        place = (0, 0) if self.frozen else (self.epoch, self.cycle)
        # The readers seed their own random numbers, so `_random` is for collating only.
        self._random = RandomStream(self.seed, "collate", self.rank, *place)
        state = resume.get("state")
        by_loader = state is not None and self.stateful is division.loader
        if by_loader:
            division.loader.load_state_dict(copy.deepcopy(state))
            state = None
        elif state is not None and "read" not in state:  # the state was saved by an earlier version of instep
            state = {"read": position * self._unit, "inner": state, "at": position * self._unit}

        def begin(pattern: Pattern) -> int:
            if pattern.common:
                return self._origin
            if resume.get("position"):
                raise self._reads_otherwise(pattern)
            return 0 if by_loader or by_batches(pattern) else position * self._unit

        def by_batches(pattern: Pattern) -> bool:
            return not pattern.workers and division.workers > 1

        with self._random.at("start"):
            self._iterator = division.start(self.seed, place, state)
        self._started, known = division.started, division.pattern is not None
        read = state["read"] if state is not None and state["inner"] is not None else 0
        pattern = division.settle(begin, "kind" in resume, read)
        self._started = division.started
        if not known:
            self._adopt(division)
        self._loaded, self._pulled = state, position
        if position and not by_loader and by_batches(pattern):
            self._skip(position)

    def _end_pass(self) -> None:
        super()._end_pass()
        if self._division is not None:
            self._division.end_pass()

    def close(self) -> None:
        if self._division is not None:
            self._division.give_up()
        super().close()
