"""One process reads for all, and sends each rank its part of every batch.

For data that every rank would read alike, or that one process alone can read. Only the reader's loader is iterated, so
random numbers, positions and states are its own, and the ranks' samples are known exactly.

What travels, over the CPU group: per batch a few numbers (the last one? how many samples for whom?) and one scatter of
bytes; what the bytes mean, and all that is not a tensor, only when it differs from the batch before.
"""

from __future__ import annotations

import copy
import math
import pickle
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from instep.data.base import PreparedLoader, Seat
from instep.data.partition import Splitter
from instep.data.sampler import share
from instep.distributed import broadcast_object, control_group, gather_object, raise_together
from instep.distributed.nested import map_leaves
from instep.errors import DataError
from instep.state import PartialState
from instep.state.collective_checks import announce
from instep.state.process import step_group
from instep.types import StateDict

_END, _BATCH, _FAILED = range(3)
_UNKNOWN = -1
_ALIGN = 16  # bytes; so that any dtype can be seen in the middle of a buffer


class _Step(NamedTuple):
    """What a rank has of a step: its part, the samples by rank (_UNKNOWN where they cannot be counted), the end."""

    batch: Any
    rows: list[int]
    last: bool


class _Totals(NamedTuple):
    """Samples in each batch of a reader that knows them beforehand: `size` up to batch `even`, then `rest`."""

    even: int
    size: int
    rest: list[int]

    def at(self, number: int) -> int:
        """Those of a batch, 0 past the end."""
        if number < self.even:
            return self.size
        return self.rest[number - self.even] if number - self.even < len(self.rest) else 0


class DispatchLoader(PreparedLoader):
    """Batches that process 0 reads and sends to all.

    Every batch is split evenly over the ranks, or with `whole` each rank gets one of `world_size` batches. A rank
    without samples gets some of another's, to replay with weight 0. The position is the reader's: moving it is a
    collective, and rank 0's state is the whole one.

    What of a batch is sliced, `Splitter` says; the rest is sent as it is. Batches arrive on the CPU.

    A window's samples weigh the same. Where the reader knows its batches' sizes, all ranks do; else the window's
    batches are weighed against its first one, and `rescale` corrects the gradients at its end.

    Args:
        loader: the user's loader.
        make_reader: makes the source that process 0 reads, as one process would; called there only.
        seat: whose batches it gives.
        batch_size: samples per rank and batch, None when unknown.
        whole: give ranks whole batches instead of slices.
        even: False: a rank without samples in the last step ends before it.
        pin: put batches into pinned memory.

    Raises:
        DataError: a batch cannot be sliced.
    """

    def __init__(
        self,
        loader: Any,
        make_reader: Callable[[], PreparedLoader],
        seat: Seat,
        *,
        batch_size: int | None,
        whole: bool,
        even: bool,
        pin: bool,
    ) -> None:
        super().__init__(loader, seat)
        self.batch_size = batch_size
        self._set_epochs = []  # the reader's business
        self._whole = whole
        self._group = self.world_size if whole else 1
        """The reader's batches in a step."""
        self._even = even
        self._pin = pin and torch.accelerator.is_available()
        self._ranks = gather_object(self.rank)  # of each process: more than one may share a rank
        self._reads = PartialState().process_index == 0
        self._reader: PreparedLoader | None = None
        self._num_batches: int | None = None
        self._given = 0
        self._pulled = 0  # batches of the epoch that the reader gave
        self._step = (-1, _Step(None, [], False))
        self._totals: _Totals | None = None
        self._first = 0  # the reader's batch that the pass begins with
        self._seen = array("q")  # samples of all ranks in each step of the pass so far, or _UNKNOWN
        self._splitter = Splitter(getattr(loader, "collate_fn", None) is default_collate)
        self._parts: list[Any] = []  # by rank: the step's structure, with a _Place for each tensor
        self._sent = b""

        def make(_: None) -> None:
            self._reader = make_reader()

        self._ask(make)

    def _ask(self, action: Callable[[Any], Any]) -> None:
        """Do something with the reader where it is; everywhere: learn where it stands then, or of its error."""
        error: Exception | None = None
        totals: _Totals | None = None
        head = torch.zeros(4, dtype=torch.int64)
        if self._reads:
            try:
                action(self._reader)
                assert self._reader is not None
                total = self._reader.num_batches
                totals = _totals(self._reader)
                first = self._reader.first_batch
                head = torch.tensor([_BATCH, first, _UNKNOWN if total is None else total, totals is not None])
            except Exception as caught:  # noqa: BLE001  `_hear` raises it, together with the other ranks
                error = caught
        _, first, total, known = _hear(head, error, "position", "preparing the data on rank 0")
        self._totals = broadcast_object(totals) if known else None
        self._pulled = self._first = first
        self._seen = array("q")
        self._begin(-(-first // self._group))
        self._given = self.first_batch
        left = math.ceil((total - first) / self._group)
        self._num_batches = None if total == _UNKNOWN else self.first_batch + left

    @property
    def num_batches(self) -> int | None:
        steps = self._num_batches
        if self._even or steps is None or steps == self.first_batch or not self.reliable:
            return steps
        return steps - (self._rows(steps - 1)[self.rank] == 0)

    @property
    def _longest(self) -> int:
        assert self._num_batches is not None
        return self._num_batches

    @property
    def reliable(self) -> bool:
        return self._totals is not None

    @property
    def even_batches(self) -> int:
        totals = self._totals
        if totals is None:
            return 0
        if not self._whole and totals.size % self.world_size:
            return self.first_batch
        return self.first_batch + (totals.even - self._first) // self._group

    def _rows(self, batch_idx: int) -> list[int]:
        """Samples by rank in a step, before it was read."""
        assert self._totals is not None
        start = self._first + (batch_idx - self.first_batch) * self._group
        if self._whole:
            return [self._totals.at(start + rank) for rank in range(self.world_size)]
        return _parts(self._totals.at(start), self.world_size)

    def reseed(self, seed: int) -> None:
        self.seed = seed
        if self._reader is not None:
            self._reader.reseed(seed)

    def _enter(self, epoch: int, cycle: int) -> None:
        super()._enter(epoch, cycle)
        self._ask(lambda reader: reader._enter(epoch, cycle))

    def start_at(self, batches: int) -> None:
        super()._enter(self.epoch, self.cycle)
        self._ask(lambda reader: reader.start_at(batches * self._group))
        self._pending = True

    def counts(self, batch_idx: int) -> tuple[int | None, int | None]:
        number, step = self._step
        if number != batch_idx:
            return None, None
        mine = step.rows[self.rank]
        return None if mine == _UNKNOWN else mine, None if _UNKNOWN in step.rows else sum(step.rows)

    def _units(self, batch_idx: int) -> tuple[int, int] | None:
        if self._totals is not None:
            rows = self._rows(batch_idx)
            return (rows[self.rank], sum(rows)) if any(rows) else None
        number, step = self._step
        if number != batch_idx:
            return None
        rows = [int(count != 0) for count in step.rows] if _UNKNOWN in step.rows else step.rows
        return (rows[self.rank], sum(rows)) if any(rows) else None

    def window_scale(self, batch_idx: int, accumulate: int) -> float:
        scale = super().window_scale(batch_idx, accumulate)
        seen = self._window_totals(batch_idx, accumulate)
        return scale * seen[-1] / max(1, seen[0]) if seen else scale

    def rescale(self, batch_idx: int, accumulate: int) -> float:
        seen = self._window_totals(batch_idx, accumulate)
        if not any(seen):
            return super().rescale(batch_idx, accumulate)
        start = batch_idx - batch_idx % accumulate
        full = start + accumulate - max(start, self.first_batch)
        return full * max(1, seen[0]) / sum(seen)

    def _window_totals(self, batch_idx: int, accumulate: int) -> Sequence[int]:
        """Samples in the window's batches up to this one; none where that is not needed or not known."""
        if self.reliable:
            return ()
        start = max(batch_idx - batch_idx % accumulate, self.first_batch)
        seen = self._seen[start - self.first_batch : batch_idx + 1 - self.first_batch]
        return seen if seen and _UNKNOWN not in seen else ()

    # ---- state

    def state_dict(self, batches_done: int) -> StateDict:
        """The reader's state, which fits whoever reads all the data, one process alone too; elsewhere hardly any."""
        reader = self._reader
        if reader is None:
            return {"kind": "read elsewhere"}
        done = reader.first_batch + (batches_done - self.first_batch) * self._group
        return reader.state_dict(min(done, self._pulled))

    def load_state_dict(self, state: StateDict) -> None:
        self._ask(lambda reader: reader.load_state_dict(state))
        self.seed, self.epoch, self.cycle = state["seed"], state["epoch"], state["cycle"]
        self._pending = True

    # ---- the pass

    def __iter__(self) -> Iterator[Any]:
        self._start_pass()
        steps = self._receive()
        step = next(steps, None)
        while step is not None and not self._over(step):
            following = None if self._even else next(steps, None)
            self.is_last = step.last or (following is not None and self._over(following))
            self._step = (self._given, step)
            self._given += 1
            self._seen.append(_UNKNOWN if _UNKNOWN in step.rows else sum(step.rows))
            yield step.batch
            step = next(steps, None) if self._even else following

    def _over(self, step: _Step) -> bool:
        """Whether this rank ends before the step."""
        return not self._even and step.last and step.rows[self.rank] == 0

    def _receive(self) -> Iterator[_Step]:
        """This rank's parts of the steps; all ranks ask for each at the same time."""
        read = self._read(self._reader) if self._reader is not None else iter(())
        while True:
            error, described, sent, buffers = None, None, b"", []
            head = torch.zeros(4 + self.world_size, dtype=torch.int64)
            try:
                found = next(read, None)
                if found is not None:
                    parts, rows, last = found
                    described, buffers = _take_apart(parts)
                    sent = pickle.dumps(described)
                    changed = sent != self._sent
                    head = torch.tensor([_BATCH, last, changed, max(map(len, buffers)), *rows])
            except Exception as caught:  # noqa: BLE001  `_hear` raises it, together with the other ranks
                error = caught
            status, last, changed, size, *rows = _hear(head, error, "batch", "reading a batch on rank 0")
            if status != _BATCH:
                return
            if changed:
                self._parts, self._sent = broadcast_object(described), sent
            mine = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
            if size:
                to_send = [_filled(buffers[rank], size) for rank in self._ranks] if self._reads else None
                dist.scatter(mine, to_send, src=0, group=step_group())
            yield _Step(_put_together(self._parts[self.rank], mine), rows, bool(last))
            if last:
                return

    def _read(self, reader: PreparedLoader) -> Iterator[tuple[list[Any], list[int], bool]]:
        """On process 0: the parts of each step by rank, the samples in them, and whether it is the last."""
        reader.history = (self.history + 1) * self._group  # with even=False the reader is a step ahead
        batches = iter(reader)
        while group := list(islice(batches, self._group)):
            self._pulled += len(group)
            if self._whole:
                replays = self.world_size - len(group)
                parts = group + [group[0]] * replays
                rows = [self._samples(batch, self._pulled - len(group) + i) for i, batch in enumerate(group)]
                rows += [0] * replays
            else:
                size = self._count(reader, group[0])
                rows = _parts(size or 0, self.world_size)
                bounds = [share(size or 0, rank, self.world_size) for rank in range(self.world_size)]
                ends = [(0, 1) if a == b else (a, b) for a, b in bounds]
                parts = [self._splitter.part(group[0], size, a, b) for a, b in ends]
            yield parts, rows, reader.is_last
            if reader.is_last:
                return

    def _count(self, reader: PreparedLoader, batch: Any) -> int | None:
        """Samples in the batch that the reader gave last."""
        if self._totals is not None:
            return self._splitter.count(batch, self._totals.at(self._pulled - 1), exact=True)
        size = reader.batch_size if isinstance(reader.batch_size, int) else None
        # Each worker process may end with a batch that is not full; and what another loader calls its size is its own.
        full = isinstance(reader.loader, DataLoader) and reader.loader.num_workers == 0 and not reader.is_last
        return self._splitter.count(batch, size, exact=full)

    def _samples(self, batch: Any, number: int) -> int:
        """Samples in a batch that is given whole, _UNKNOWN where they cannot be counted."""
        if self._totals is not None:
            return self._totals.at(number)
        try:
            count = self._splitter.count(batch, self.batch_size)
        except DataError:
            return _UNKNOWN
        return _UNKNOWN if count is None else count

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _hear(head: torch.Tensor, error: Exception | None, operation: str, doing: str) -> list[int]:
    """The reader's numbers; or its error, raised on every rank."""
    if error is not None:
        head[0] = _FAILED
    announce(control_group(), f"dispatch: {operation}")
    dist.broadcast(head, src=0, group=step_group())
    numbers = head.tolist()
    if numbers[0] == _FAILED:
        raise_together(error, doing)
    return numbers


def _totals(reader: PreparedLoader) -> _Totals | None:
    """What a reader knows beforehand of its batches' sizes."""
    first, total = reader.first_batch, reader.num_batches
    if total is None or not reader.reliable:
        return None
    even = max(first, min(reader.even_batches, total))
    size, *rest = (reader.counts(number)[1] for number in (first, *range(even, total)))
    if size is None or None in rest:
        return None
    return _Totals(even, size, [count or 0 for count in rest])


def _parts(size: int, world_size: int) -> list[int]:
    """Samples by rank."""
    return [end - begin for begin, end in (share(size, rank, world_size) for rank in range(world_size))]


class _Place:
    """Stands for a tensor in what is sent of a batch's structure."""

    __slots__ = ("dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _take_apart(parts: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Each part's structure, and the bytes of its tensors one after the other."""
    described, buffers = [], []
    for part in parts:
        pieces: list[torch.Tensor] = []

        def place(leaf: Any, pieces: list[torch.Tensor] = pieces) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            pieces.extend([raw, raw.new_zeros(-len(raw) % _ALIGN)])
            return _Place(leaf)

        described.append(map_leaves(place, part))
        buffers.append(torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8))
    return described, buffers


def _filled(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([buffer, buffer.new_zeros(size - len(buffer))]) if len(buffer) < size else buffer


def _put_together(described: Any, buffer: torch.Tensor) -> Any:
    offset = 0

    def take(leaf: Any) -> Any:
        nonlocal offset
        if not isinstance(leaf, _Place):
            return copy.deepcopy(leaf)  # the description may serve the next batch too
        begin, end = offset, offset + leaf.num_bytes
        offset = end + -end % _ALIGN
        return buffer[begin:end].view(leaf.dtype).view(leaf.shape)

    return map_leaves(take, described)
