"""`StreamLoader`: a loader that is iterated as it is, in an order that instep does not know, perhaps without a length.

The end of the data is found in one of three ways. With a reliable length, nothing is read ahead. Without a reliable
length, a single process reads one batch ahead. Several processes read two batches ahead: while a batch is used, the
ranks agree on how many of them have the next one, so that neither the step nor the reading waits.

The saved position is the loader's or data set's own `state_dict`, taken before each batch is read, or else a number of
batches to read and throw away. Random numbers that are drawn while a batch is read come from a separate stream for each
batch, so they do not change if the batch is read ahead or read again. If the first three batches drew no random
numbers, only every 64th later batch is read with its own stream and checked for draws, since this check costs time. If
such a batch draws random numbers after all, every later batch has its own stream again, and a warning says that a
resume may differ.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from instep.data.base import OWN_END, DataShard, PreparedLoader, described
from instep.data.foreign_sampler import generators
from instep.data.plan import Plan, Share
from instep.data.seeding import RandomStream
from instep.data.workers import end_workers, start_workers
from instep.distributed import find_batch_size, gather_object
from instep.errors import DataError, UsageError
from instep.state.process import step_group
from instep.types import StateDict, Stateful
from instep.utils.seed import derive_seed
from instep.utils.warn import warn_user

# after QUIET_AFTER fetches without random numbers, only every 64th fetch is watched, since watching costs tens of us
QUIET_AFTER = 3
WATCH_EVERY = 64
COUNT_BATCHES, COUNT_S = 10_000, 2.0  # limits for reading left-out batches only to count them
_END = object()


class BatchAgreement:
    """Agreement of ranks on a batch: an all-reduce that starts when the batch is read, and ends before its use.

    Every rank must start the agreements of the same batches in the same order.

    Args:
        have: whether this rank has the batch.
        size: number of samples in the batch; None if unknown.
        world_size: number of ranks that share the data. Several processes with the same data rank count as one.
    """

    def __init__(self, have: bool, size: int | None, world_size: int) -> None:
        group = step_group()
        assert group is not None
        self._processes = group.size() // world_size  # number of processes with the same data rank
        self._numbers = torch.tensor([have, size is not None, size or 0], dtype=torch.int64)
        self._work: Any = dist.all_reduce(self._numbers, group=group, async_op=True)
        self._read: tuple[int, int | None] | None = None

    def read(self) -> tuple[int, int | None]:
        """Wait; return how many ranks have the batch, and its number of samples on all ranks (None if unknown)."""
        if self._read is None:
            self._work.wait()
            have, known, size = self._numbers.tolist()
            total = size // self._processes if known == have and size else None
            self._read = (have // self._processes, total)
        return self._read


class _ReadAhead(NamedTuple):
    batch: Any
    size: int | None
    agreed: BatchAgreement


class StreamLoader(PreparedLoader):
    """Batches of any iterable. Each rank iterates its own iterable.

    Args:
        loader: the iterable.
        shard: the rank whose batches these are.
        length: reliable number of batches, the same on all ranks; None if it is known only when the data ends.
        estimate: number of batches to show if `length` is None.
        limit: largest number of batches in an epoch; None for all.
        uneven: what to do if ranks have different numbers of batches. "stop" ends with the first exhausted rank, with a
            warning. With "join" an exhausted rank replays its last batch (or a batch of another rank, if it had none)
            with weight 0 until all ranks are exhausted. "error" raises an error. With `OWN_END` each rank ends after
            its own number of batches.
        stateful: object whose state is the position in the data; None if the position is a number of batches.
        frozen: whether every epoch has the random numbers of the first one.
        rewinds: object whose first state is loaded again if a pass was left before its end; None if there is no such
            object.

    Attributes:
        common: whether the ranks read different batches of one common order. Then all ranks have the same position, and
            it is no error if the last step has fewer batches than there are ranks.
    """

    def __init__(
        self,
        loader: Any,
        shard: DataShard,
        *,
        length: int | None = None,
        estimate: int | None,
        limit: int | None,
        uneven: str,
        stateful: Stateful | None,
        frozen: bool,
        rewinds: Stateful | None,
    ) -> None:
        super().__init__(loader, shard, frozen=frozen)
        self.uneven = uneven
        self.common = False
        self._rewinds = rewinds
        self._first_state: StateDict | None = None
        self.stateful = stateful
        self._loaded: StateDict | None = None  # the loaded state; None once a batch was read after it
        self._length = _least(length, limit) if length is not None else None
        self._set_ends(estimate, limit)
        self._generators = _generators(loader)
        self._iterator: Iterator[Any] | None = None
        self._started: Any = None  # the loader's iterator with workers, if this object has started it
        self._resume: StateDict | None = None
        self._ever_gave = False
        # whether the loader is a generator that is already exhausted
        self._was_over = getattr(loader, "gi_frame", self) is None
        self._looked_at_sizes = False
        self._counted = False  # whether the batches that uneven="stop" leaves out were counted
        self._end_is_unread = False  # whether the last pass ended before the end of the data
        self._reset()

    def _set_ends(self, estimate: int | None, limit: int | None) -> None:
        self._estimate, self._limit = _least(estimate, limit), sys.maxsize if limit is None else limit

    @property
    def _own_ends(self) -> bool:
        """Whether ranks may have different numbers of batches."""
        return self.world_size > 1 and (self.uneven == OWN_END or (self.uneven == "join" and self._length is None))

    @property
    def rank_state(self) -> bool:  # type: ignore[override]
        return not self.common and (self.stateful is not None or self._own_ends)

    @property
    def _iterated(self) -> Any:
        """The iterable that is read: by default the user's loader."""
        return self.loader

    @property
    def _end(self) -> int:
        """Largest number of batches in the pass."""
        end = self._limit if self._length is None else self._length
        return end if self._stop is None else min(end, self._stop)

    def _reset(self) -> None:
        self._stop: int | None = None  # number of batches after which the pass ends; None: no limit
        self._given = 0  # number of batches of the epoch that were yielded
        # number of batches of the epoch requested from the loader, including a request that found the end
        self._pulled = 0
        self._snapshots: dict[int, StateDict] = {}
        self._own_end: int | None = None  # this rank's number of batches, known once it is exhausted
        self._replay: Any = _END

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            length = self._length
            self._plan = Plan(
                self.first_batch,
                self._estimate if length is None else length,
                uniform_until=0,
                total_is_final=length is not None,
                alike=self.world_size == 1,
                sizes_seen=self._seen_between,
            )
        return self._plan

    def _enter(self, epoch: int, cycle: int) -> None:
        super()._enter(epoch, cycle)
        self._resume = None
        self._reset()

    def start_at(self, batches: int) -> None:
        self._enter(self.epoch, self.cycle)
        self._resume_at({"batches": batches, "own": None, "finished": False})

    def start_before(self) -> None:
        stop = self.first_batch
        self.start_at(0)
        self._stop = stop

    def _resume_at(self, state: StateDict) -> None:
        self._resume = state
        self._begin(state["batches"])
        self._given = self._pulled = state["batches"]
        self._pending = True

    def state_dict(self, batches_done: int) -> StateDict:
        resume = self._resume
        if resume is not None and "kind" in resume and batches_done == resume["batches"] == self._given:
            return copy.deepcopy(resume)
        finished = batches_done >= (self._given if self._length is None else self._length)
        finished = finished and (self.share.last or self._length is not None)
        joined = (
            self.uneven == "join" and not self.common and self._own_end is not None and self._own_end <= batches_done
        )
        own = self._own_end if joined else None
        state: StateDict = {
            "kind": "stream",
            "epoch": self.epoch,
            "cycle": self.cycle,
            "seed": self.seed,
            "world_size": self.world_size,
            "rank": self.rank,
            "batches": batches_done,
            "batch_size": self.batch_size,
            "own": own,
            "finished": finished,
            "ahead": 0 if not finished else 1 if own is not None else self._pulled - batches_done,
        }
        if self.stateful is not None:
            # an exhausted rank replays its last batch, so use the position before this batch
            position = batches_done if own is None else max(own - 1, 0)
            if finished and self.stateful is not self._iterated:
                state["state"] = self._state_now()
            elif position in self._snapshots:
                state["state"] = copy.deepcopy(self._snapshots[position])
            elif position == self._pulled:  # no batch was read after this position, so the current state belongs to it
                state["state"] = self._state_now()
            else:
                raise UsageError(
                    f"the loader's own state after {batches_done} batches is gone: {self._given} were given since, and "
                    f"the states of the last {self.history} are kept. Save nearer to the batch, or set `history`"
                )
        return state

    def _state_now(self) -> StateDict | None:
        if self.stateful is None or (self._iterator is None and self.stateful is self._iterated):
            return None  # a loader that was not started has no state to save: it is at its beginning
        # litdata's data set loses a loaded state if its state_dict is called before the next batch is read
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        return copy.deepcopy(self.stateful.state_dict())

    def load_state_dict(self, state: StateDict) -> None:
        if state.get("kind") != "stream":
            raise DataError(
                f"the checkpoint's data position is of another kind of loader ({state.get('kind')!r}). Resume with "
                "the loader it was taken with, or from the end of an epoch"
            )
        moved = state["world_size"] != self.world_size or (self.rank_state and state["rank"] != self.rank)
        if moved and state["batches"] and not state["finished"]:
            raise DataError(
                f"the checkpoint's data position was taken within an epoch by rank {state['rank']} of "
                f"{state['world_size']}; this is rank {self.rank} of {self.world_size}, and instep does not know how "
                f"{type(self.loader).__name__} spreads its data. Resume with as many processes, or from the end of an "
                "epoch"
            )
        resized = state.get("state") is None and state.get("batch_size", self.batch_size) != self.batch_size
        if resized and state["batches"] and not state["finished"]:
            raise DataError(
                f"the checkpoint's data position is {state['batches']} batches of {state['batch_size']} samples; now "
                f"the loader reads {self.batch_size} at once, so it would go on elsewhere. Resume with the same batch "
                "size (times the number of processes, where rank 0 reads for all), or from the end of an epoch"
            )
        self.seed = state["seed"]
        self._enter(state["epoch"], state["cycle"])
        self._resume_at(state)
        if state["finished"] and not moved:
            self._go_to_end(state)

    def _go_to_end(self, state: StateDict) -> None:
        """Load the state at an epoch's end into a data set or loader whose state lasts over epochs."""
        if self.stateful is None or state.get("state") is None:
            return
        # a data set's state does not include the iterator, so it is enough to load the state
        if self.stateful is not self._iterated:
            self.stateful.load_state_dict(copy.deepcopy(state["state"]))
            return
        # Move the loader's iterator to its position in the saved run. `ahead` is the number of reads up to the end of
        # the data; it is 0 if the pass was left before the end.
        self._open()
        ended = any(self._pull() is _END for _ in range(state["ahead"]))
        # If the iterator has not reached its end now, load the saved state again, since the next epoch must begin with
        # it.
        if state["ahead"] and not ended:
            self.stateful.load_state_dict(copy.deepcopy(state["state"]))
        self._iterator = None

    def __iter__(self) -> Iterator[Any]:
        self._start_pass()
        resume = self._resume
        if (resume is not None and resume["finished"]) or self._given >= self._end:
            return
        alone = self.world_size == 1 or self.uneven == OWN_END
        by_itself = self._length is not None or self._iterated is not self.loader
        # without torch.distributed, a rank that reads its own part makes no agreements
        alone = alone or (by_itself and not dist.is_initialized())
        if alone and self._length is not None and isinstance(self.loader, Sequence):
            yield from self._give_sized(self._end, lambda: self.loader[self._given])
            return
        try:
            self._open()
            if not alone:
                yield from self._give_together()
            elif self._length is not None:
                yield from self._give_sized(self._end, self._pull)
            else:
                yield from self._give_alone()
        except Exception as error:
            from instep.data.read_errors import explain  # imported late: used only for an error

            cause = explain(error, self._started)
            self.close()
            self._iterator = None
            if cause is not None:
                raise cause from error
            raise
        finally:
            # When the interpreter ends, torch 2.13 aborts if a tensor that was sliced or copied here is freed.
            if sys is not None and not sys.is_finalizing():
                self._end_pass()

    def _end_pass(self) -> None:
        """End a pass that has given all its batches, or that was left before."""
        # keep the last state, since `state_dict` may be called after the pass
        if self._iterator is not None and self.stateful is self._iterated:
            self._snapshots[self._pulled] = self._state_now() or {}
        self._iterator = None
        if not self._keeps_workers:
            end_workers(self._started)

    @property
    def _keeps_workers(self) -> bool:
        """Whether the loader keeps its iterator after a pass: a loader of torchdata, or with persistent workers."""
        return self._started is not None and getattr(self._iterated, "_iterator", None) is self._started

    def _rewind(self) -> None:
        """Load the first state of `rewinds` again, if the last pass was left before the end of the data."""
        if self._end_is_unread and self._rewinds is not None:
            self._rewinds.load_state_dict(copy.deepcopy(self._first_state) or {})
        self._end_is_unread = False

    def close(self) -> None:
        self._rewind()
        end_workers(self._started)
        if self._keeps_workers:
            self._iterated._iterator = None
        self._started = None

    def _open(self) -> None:
        """Start the loader's iterator, and move it to the first batch of the pass."""
        resume = self._resume or {}
        batches, own = resume.get("batches", 0), resume.get("own")
        position = batches if own is None else max(own - 1, 0)
        place = (0, 0) if self.frozen else (self.epoch, self.cycle)
        self._random = RandomStream(self.seed, "data", self.rank, *place)
        self._silent: float = 0  # number of successive fetches that drew no random numbers
        for generator, initial in self._generators:
            generator.manual_seed(derive_seed(self.seed, "generator", initial, *place))
        self._rewind()
        if self._rewinds is not None and self._first_state is None:
            self._first_state = copy.deepcopy(self._rewinds.state_dict())
        if not getattr(self.loader, "persistent_workers", False):
            end_workers(self._started)  # a pass that was left early may still have workers
        self._start(resume, position)
        # this rank was exhausted before the checkpoint was saved, and needs its last batch to replay it
        if own is not None:
            if own:
                self._replay = self._pull()
            else:
                self._snapshots[0] = resume.get("state") or {}
            self._own_end, self._pulled = own, batches

    def _start(self, resume: StateDict, position: int) -> None:
        """Start the loader's iterator, and advance it to the batch at which the pass resumes."""
        state = resume.get("state")
        with self._random.at("start"):
            if state is not None and self.stateful is not None:
                self.stateful.load_state_dict(copy.deepcopy(state))
                self._loaded = state
            self._iterator, started = start_workers(self.loader)
        self._started = self._started if started is None else started
        self._pulled = position
        if state is None and position:
            self._skip(position)

    def _skip(self, batches: int) -> None:
        if isinstance(self.loader, Sequence):
            self._iterator = iter(self.loader[batches:])
            if self._own_ends and batches >= len(self.loader):
                self._own_end = len(self.loader)
                self._replay = self.loader[-1] if self._own_end else _END
            return
        warn_user(
            f"{type(self.loader).__name__} cannot say where it stands: {batches} batches are read again and thrown "
            "away to resume. Give the data set or loader state_dict and load_state_dict (with workers: use torchdata's "
            "StatefulDataLoader)"
        )
        assert self._iterator is not None
        for number in range(batches):
            with self._random.at(number):
                batch = next(self._iterator, _END)
            if batch is _END:
                if self._own_ends:
                    self._own_end = number
                # raise only if a state was loaded, since `start_at` may skip a whole epoch
                elif "kind" in (self._resume or {}):
                    raise DataError(f"the loader ended after {number} batches, but is to resume after {batches}")
                return
            self._replay = batch if self._own_ends else _END

    def _pull(self) -> Any:
        """Fetch the loader's next batch; return _END if there is none."""
        assert self._iterator is not None
        number = self._pulled
        if self.stateful is not None:
            self._snapshots[number] = self._state_now() or {}
            self._loaded = None
            # keep states of two more batches than `history`, since up to two batches are read ahead
            self._snapshots.pop(number - 3 - self.history, None)
        if self._silent >= QUIET_AFTER and number % WATCH_EVERY:
            batch = next(self._iterator, _END)
        else:
            with self._random.at(number, watch=True):
                batch = next(self._iterator, _END)
                if (
                    batch is _END and not number and self._started is None and self._iterated is self.loader
                ):  # the iterator may be the exhausted one of the last pass, so make a new one
                    self._iterator = iter(self.loader)
                    batch = next(self._iterator, _END)
            self._note_draws(number)
        self._pulled, self._end_is_unread = number + 1, batch is not _END
        return batch

    def _check_not_used_up(self) -> None:
        """Raise DataError if a new pass finds no batch although an earlier pass had batches."""
        if self._ever_gave or self._was_over:
            raise DataError(
                f"the {described(self.loader)} gave its batches in an earlier pass and has no more. A generator gives "
                "its values once: give an object that can be iterated again (a list, a DataLoader, a class whose "
                "__iter__ makes a new generator each time)"
            )

    def _note_draws(self, number: int) -> None:
        """Record whether a fetch drew random numbers.

        After a fetch that did, each later fetch has its own random stream.
        """
        if not self._random.drew:
            self._silent += 1
            return
        if self._silent >= QUIET_AFTER:
            warn_user(
                f"{type(self.loader).__name__} drew random numbers for batch {number} after {number} batches without. "
                "Those that it drew unseen came from the training's generators, so a resume within this epoch may not "
                "repeat them. Draw from a generator of the loader's own"
            )
        self._silent = -math.inf

    def _give_sized(self, length: int, pull: Callable[[], Any]) -> Iterator[Any]:
        for number in range(self._given, length):
            batch = pull()
            if batch is _END:
                if not number:
                    self._check_not_used_up()
                raise self._too_short(number)
            self._ever_gave = True
            self._give_own(batch, number == length - 1)
            yield batch

    def _too_short(self, number: int) -> DataError:
        return DataError(
            f"{type(self.loader).__name__} has a length of {self._length} batches but gave only {number}. Mend its "
            "__len__, or take it away: data without a length is welcome. If it goes on where the pass before was left, "
            "let its __iter__ begin anew, or give it state_dict and load_state_dict"
        )

    def _give_alone(self) -> Iterator[Any]:
        batch, end = self._pull(), self._end
        if batch is _END and not self._given:
            self._check_not_used_up()
        while batch is not _END:
            self._ever_gave = True
            following = _END if self._pulled >= end else self._pull()
            self._give_own(batch, following is _END)
            yield batch
            batch = following

    def _give_own(self, batch: Any, last: bool) -> None:
        """Record a batch as yielded, without an agreement of ranks on its size.

        A single process counts the samples of the last batch; with `history` above 1, of all batches.
        """
        if self.history > 1 and self.world_size == 1:
            self._give(Share(None, self._size(batch), last))
            return
        if last:
            self.share = Share(all=find_batch_size(batch) if self.world_size == 1 else None, last=True)
        self._given += 1

    def _size(self, batch: Any) -> int | None:
        """Count a batch's samples, from which the weights of ranks and of batches in an accumulation window follow.

        Warn once if the number of samples is uncertain.
        """
        if not self._looked_at_sizes:
            from instep.distributed.uncounted import doubt_of_size  # imported late: used only for the first batch

            self._looked_at_sizes = True
            if self.rank == 0 and (doubt := doubt_of_size(batch, getattr(self.loader, "batch_size", None))):
                warn_user(
                    f"the samples in a batch of the {described(self.loader)}, by which the gradients of a window and "
                    f"of ranks are weighed, are not known: {doubt}. Give batches whose tensors all begin with the "
                    "sample, or map-style data"
                )
        return find_batch_size(batch)

    def _give_together(self) -> Iterator[Any]:
        number, end = self._given, self._end
        slots: deque[_ReadAhead] = deque()
        for ahead in range(number, min(number + 2, end)):
            slots.append(self._look_ahead(ahead))
        begin, (ranks, _) = number, slots[0].agreed.read()
        if not number and not ranks:
            self._check_not_used_up()
        more = self._goes_on(number, slots[0])
        self._ever_gave = self._ever_gave or more
        while more:
            if (self.common or number == begin) and slots[0].agreed.read()[0] < self.world_size:
                self._borrow(slots[0].batch)
            slot = slots.popleft()
            if number + 2 < end:
                slots.append(self._look_ahead(number + 2))
            more = bool(slots) and self._goes_on(number + 1, slots[0])
            ranks, total = slot.agreed.read()
            local = 0 if slot.batch is _END else slot.size
            units = (int(slot.batch is not _END), ranks)
            if total is not None and local is not None:
                units = (local, total)
            self._give(Share(local, total, not more, units))
            batch = self._replay if slot.batch is _END else slot.batch
            number += 1
            yield batch
        if slots and slots[0].agreed.read()[0] and not (self._counted or self.common):
            self._counted = True
            self._warn_of_rest([slot.batch for slot in slots if slot.batch is not _END])

    def _borrow(self, batch: Any) -> None:
        """Get a batch to replay from another rank, if this rank never had a batch. Collective."""
        lacks = batch is _END and (self.common or self._replay is _END)
        everyone = gather_object((batch is not _END, lacks))
        if any(lacking for _, lacking in everyone):
            giver = next(place for place, (has_one, _) in enumerate(everyone) if has_one)
            group = step_group()
            assert group is not None
            lent = gather_object((batch if group.rank() == giver else None,))
            self._replay = lent[giver][0] if lacks else self._replay

    def _warn_of_rest(self, left: list[Any]) -> None:
        """Warn, on one process, of the batches that uneven="stop" leaves out. Collective.

        `left` are batches that are already read. Further batches are read and counted for a short time, if this does
        not change the next pass.
        """
        sizes, is_all, until_s = [find_batch_size(batch) for batch in left], True, time.monotonic() + COUNT_S
        while left and self._own_end is None and self._pulled < self._end:
            again = self.stateful is None and not hasattr(self.loader, "__next__")
            if not again or len(sizes) >= COUNT_BATCHES or time.monotonic() > until_s:
                is_all = False
                break
            batch = self._pull()
            if batch is _END:
                break
            sizes.append(find_batch_size(batch))
        samples = None if None in sizes else sum(size or 0 for size in sizes)
        by_rank = dict(sorted(gather_object((self.rank, (len(sizes), samples, is_all)))))
        group = step_group()
        if group is None or group.rank():
            return
        batches, known = sum(one[0] for one in by_rank.values()), [one[1] for one in by_rank.values()]
        samples = "" if None in known else f" ({sum(known):,} samples)"
        where = ", ".join(f"{one[0]:,} on rank {rank}" for rank, one in by_rank.items() if one[0])
        warn_user(
            f"ranks have different numbers of batches in their {described(self.loader)}. With uneven='stop' the epoch "
            f"ends with the first rank that has no more, after {self._given} batches, and leaves out "
            f"{'' if all(one[2] for one in by_rank.values()) else 'at least '}{batches:,} batches{samples}: {where}. "
            "Trainer(uneven='join') trains on all of them"
        )

    def _look_ahead(self, number: int) -> _ReadAhead:
        """Read a batch, if there is one, and start the agreement of the ranks on it."""
        batch = _END
        if self._own_end is None:
            batch = self._pull()
            if batch is _END and self._length is not None:
                raise self._too_short(number)
            if batch is _END:
                self._own_end = number
            elif self.uneven == "join":
                self._replay = batch
        size = None if batch is _END else self._size(batch)
        return _ReadAhead(batch, size, BatchAgreement(batch is not _END, size, self.world_size))

    def _goes_on(self, number: int, slot: _ReadAhead) -> bool:
        """Return True if the ranks run batch `number`. With uneven="error", raise DataError if only some have it."""
        ranks, _ = slot.agreed.read()
        if self.uneven == "error" and 0 < ranks < self.world_size:
            raise DataError(
                f"{self.world_size - ranks} of {self.world_size} ranks have no batch {number} (rank {self.rank} has "
                f"{'none' if slot.batch is _END else 'one'}). Give every rank as many, or choose uneven='stop' or "
                "'join'"
            )
        return ranks > 0 if self.uneven == "join" else ranks == self.world_size


def _least(number: int | None, limit: int | None) -> int | None:
    known = [value for value in (number, limit) if value is not None]
    return min(known) if known else None


def _generators(loader: Any) -> list[tuple[torch.Generator, int]]:
    """Return the loader's generators with the seeds that the user gave them."""
    samplers = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    found = {id(generator): generator for part in (*samplers, loader) for generator in generators(part)}
    # torchdata's sampler makes a generator with a random seed if the user gave the loader none
    own = type(loader).__module__.startswith("torchdata.") and getattr(loader, "generator", None) is None
    return [(generator, 0 if own else generator.initial_seed()) for generator in found.values()]
