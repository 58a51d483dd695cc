"""`DispatchLoader`: one process reads the data, and sends each rank its part of every batch.

This is for data that would be the same on every rank, or that only one process can read. Only the reading process
iterates the loader, so random numbers, positions and states are those of this process, and the samples of each rank are
known exactly.

Per batch, two things are sent over the CPU process group: a few numbers (whether it is the last batch, and how many
samples each rank gets), and the bytes of its tensors in one scatter. Its structure, and its values that are not
tensors, are sent only if they differ from those of the previous batch.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from instep.data.base import UNKNOWN, DataShard, PreparedLoader
from instep.data.partition import Splitter
from instep.data.plan import Plan, Share
from instep.data.sampler import local_slice
from instep.distributed import broadcast_object, control_group, gather_object, raise_together
from instep.distributed.nested import map_leaves
from instep.errors import DataError
from instep.state import PartialState
from instep.state.collective_checks import announce
from instep.state.process import step_group
from instep.types import StateDict

_END, _BATCH, _FAILED = range(3)
_ALIGN = 16  # in a buffer, a view of any dtype can begin at each multiple of this number of bytes


class _Step(NamedTuple):
    """One step: this rank's slice, the samples of each rank (UNKNOWN if not countable), whether it is the last step."""

    batch: Any
    rows: list[int]
    last: bool


class _BatchSizes(NamedTuple):
    """Numbers of samples in a reader's batches: `size` in each batch before index `even`, and `rest` in later ones."""

    even: int
    size: int
    rest: list[int]

    def at(self, number: int) -> int:
        """Return the number of samples in batch `number`; 0 after the end."""
        if number < self.even:
            return self.size
        return self.rest[number - self.even] if number - self.even < len(self.rest) else 0


class DispatchLoader(PreparedLoader):
    """Batches that process 0 reads; it sends each rank its part of every batch.

    Every batch is split evenly over the ranks; with `whole`, each rank gets one of `world_size` batches instead. A rank
    without samples gets samples of another rank, to replay them with weight 0. The position in the data is that of the
    reader: moving it is a collective, and only rank 0's state is complete.

    `Splitter` decides which parts of a batch are sliced; the other parts are sent whole. Batches arrive on the CPU.

    All samples of an accumulation window have the same weight. If the reader knows the sizes of its batches in advance,
    all ranks know them. Otherwise a batch is weighed relative to the window's first batch, and `gradient_correction`
    corrects the gradients at the window's end.

    Args:
        loader: the user's loader.
        make_reader: function that makes the source that process 0 reads, prepared as for a single process; called only
            on process 0.
        shard: the rank whose batches these are.
        batch_size: samples per rank and batch; None if unknown.
        whole: whether ranks get whole batches instead of slices.
        even: whether all ranks run the last step. With False, a rank without samples in it ends earlier.
        pin: whether to put batches into pinned memory.

    Raises:
        DataError: a batch cannot be sliced.
    """

    history: int = 2  # numbers of samples are remembered by default, since most accumulation windows need them

    def __init__(
        self,
        loader: Any,
        make_reader: Callable[[], PreparedLoader],
        shard: DataShard,
        *,
        batch_size: int | None,
        whole: bool,
        even: bool,
        pin: bool,
    ) -> None:
        super().__init__(loader, shard)
        self.batch_size = batch_size
        self._set_epochs = []  # only the reader calls `set_epoch` of the user's objects
        self._whole = whole
        self._group = self.world_size if whole else 1
        """Number of batches that the reading rank takes from its loader for one step of all ranks."""
        self._even = even
        self._pin = pin and torch.accelerator.is_available()
        # for each process, the index of the part that it gets of each batch; several processes may get the same part
        self._ranks = gather_object(self.rank)
        self._reads = PartialState().process_index == 0
        self._reader: PreparedLoader | None = None
        self._num_batches: int | None = None
        self._pulled = 0  # batches of the epoch that the reader has yielded
        self._totals: _BatchSizes | None = None
        self._first = 0  # index of the reader's batch with which the pass begins, from 0 in the epoch
        self._splitter = Splitter(getattr(loader, "collate_fn", None) is default_collate)
        self._parts: list[Any] = []  # structure of each rank's step, with a _TensorSpec in place of each tensor
        self._sent = b""

        def make(_: None) -> None:
            self._reader = make_reader()

        self._with_reader(make)

    def _with_reader(self, action: Callable[[Any], Any]) -> None:
        """Call a function with the reader on process 0. All ranks then learn the reader's position, or its error."""
        error: Exception | None = None
        totals: _BatchSizes | None = None
        head = torch.zeros(4, dtype=torch.int64)
        if self._reads:
            try:
                action(self._reader)
                assert self._reader is not None
                total = self._reader.num_batches
                totals = _totals(self._reader)
                first = self._reader.first_batch
                head = torch.tensor([_BATCH, first, UNKNOWN if total is None else total, totals is not None])
            except Exception as caught:  # noqa: BLE001  `_receive_head` raises it, together with the other ranks
                error = caught
        _, first, total, known = _receive_head(head, error, "position", "preparing the data on rank 0")
        self._totals = broadcast_object(totals) if known else None
        self._pulled = self._first = first
        self._begin(-(-first // self._group))
        self._given = self.first_batch
        left = math.ceil((total - first) / self._group)
        self._num_batches = None if total == UNKNOWN else self.first_batch + left

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            totals, steps, first = self._totals, self._num_batches, self.first_batch
            even = 0
            if totals is not None:
                split_evenly = self._whole or totals.size % self.world_size == 0
                even = first + ((totals.even - self._first) // self._group if split_evenly else 0)
            ends_early = not self._even and totals is not None and steps is not None and steps != first
            self._plan = Plan(
                first,
                steps - (self._rows(steps - 1)[self.rank] == 0) if ends_early and steps is not None else steps,
                uniform_until=even,
                total_is_final=totals is not None,
                longest_total=steps,
                share_of=None if totals is None else lambda number: self._share_of(self._rows(number)),
                sizes_seen=self._seen_between if totals is None else None,
            )
        return self._plan

    def _share_of(self, rows: list[int], last: bool = False) -> Share:
        """Return the share of a batch (samples of this rank and of all) from its number of samples on each rank."""
        mine, unknown = rows[self.rank], UNKNOWN in rows
        weights = [int(count != 0) for count in rows] if unknown else rows
        units = (weights[self.rank], sum(weights)) if any(weights) else None
        return Share(None if mine == UNKNOWN else mine, None if unknown else sum(rows), last, units)

    def _rows(self, batch_idx: int) -> list[int]:
        """Calculate the number of samples of each rank in a step that has not been read yet."""
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
        self._with_reader(lambda reader: reader._enter(epoch, cycle))

    def start_at(self, batches: int) -> None:
        super()._enter(self.epoch, self.cycle)
        self._with_reader(lambda reader: reader.start_at(batches * self._group))
        self._pending = True

    def start_before(self) -> None:
        super()._enter(self.epoch, self.cycle)
        self._with_reader(lambda reader: reader.start_before())
        self._pending = True

    # ---- state

    def state_dict(self, batches_done: int) -> StateDict:
        """Return the reader's state, which is that of one process that reads all the data.

        On ranks other than 0, return a placeholder.
        """
        reader = self._reader
        if reader is None:
            return {"kind": "read elsewhere", "seed": self.seed, "epoch": self.epoch, "cycle": self.cycle}
        done = reader.first_batch + (batches_done - self.first_batch) * self._group
        return reader.state_dict(min(done, self._pulled))

    def load_state_dict(self, state: StateDict) -> None:
        self._with_reader(lambda reader: reader.load_state_dict(state))
        self.seed, self.epoch, self.cycle = state["seed"], state["epoch"], state["cycle"]
        self._pending = True

    # ---- the pass

    def __iter__(self) -> Iterator[Any]:
        self._start_pass()
        steps = self._receive()
        step = next(steps, None)
        while step is not None and not self._over(step):
            following = None if self._even else next(steps, None)
            last = step.last or (following is not None and self._over(following))
            self._give(self._share_of(step.rows, last))
            yield step.batch
            step = next(steps, None) if self._even else following

    def _over(self, step: _Step) -> bool:
        """Return True if this rank ends before the step because it has no sample in this step."""
        return not self._even and step.last and step.rows[self.rank] == 0

    def _receive(self) -> Iterator[_Step]:
        """Yield each step with this rank's slice. All ranks must request each step together."""
        read = self._read(self._reader) if self._reader is not None else iter(())
        while True:
            error, described, sent, buffers = None, None, b"", []
            head = torch.zeros(4 + self.world_size, dtype=torch.int64)
            try:
                found = next(read, None)
                if found is not None:
                    parts, rows, last = found
                    described, buffers = _flatten(parts)
                    sent = pickle.dumps(described)
                    changed = sent != self._sent
                    head = torch.tensor([_BATCH, last, changed, max(map(len, buffers)), *rows])
            except Exception as caught:  # noqa: BLE001  `_receive_head` raises it, together with the other ranks
                error = caught
            status, last, changed, size, *rows = _receive_head(head, error, "batch", "reading a batch on rank 0")
            if status != _BATCH:
                return
            if changed:
                self._parts, self._sent = broadcast_object(described), sent
            mine = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
            if size:
                to_send = [_filled(buffers[rank], size) for rank in self._ranks] if self._reads else None
                dist.scatter(mine, to_send, src=0, group=step_group())
            yield _Step(_join(self._parts[self.rank], mine), rows, bool(last))
            if last:
                return

    def _read(self, reader: PreparedLoader) -> Iterator[tuple[list[Any], list[int], bool]]:
        """Yield each step, on process 0: the ranks' parts, their numbers of samples, whether it is the last step."""
        # remember one step more, since with even=False the reader is one step ahead
        reader.history = (self.history + 1) * self._group
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
                bounds = [local_slice(size or 0, rank, self.world_size) for rank in range(self.world_size)]
                ends = [(0, 1) if a == b else (a, b) for a, b in bounds]
                parts = [self._splitter.part(group[0], size, a, b) for a, b in ends]
            yield parts, rows, reader.share.last
            if reader.share.last:
                return

    def _count(self, reader: PreparedLoader, batch: Any) -> int | None:
        """Count the samples in the batch that the reader yielded last."""
        if self._totals is not None:
            return self._splitter.count(batch, self._totals.at(self._pulled - 1), exact=True)
        size = reader.batch_size if isinstance(reader.batch_size, int) else None
        # The loader's batch size is not trusted if each worker process may end with a smaller batch, or if the loader
        # is not a DataLoader, since its `batch_size` may mean something else.
        full = isinstance(reader.loader, DataLoader) and reader.loader.num_workers == 0 and not reader.share.last
        return self._splitter.count(batch, size, exact=full)

    def _samples(self, batch: Any, number: int) -> int:
        """Count the samples in a batch that is sent whole; UNKNOWN if they cannot be counted."""
        if self._totals is not None:
            return self._totals.at(number)
        try:
            count = self._splitter.count(batch, self.batch_size)
        except DataError:
            return UNKNOWN
        return UNKNOWN if count is None else count

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


def _receive_head(head: torch.Tensor, error: Exception | None, operation: str, doing: str) -> list[int]:
    """Receive the numbers that describe the reader's batch or position. Raise an error of the reader on every rank."""
    if error is not None:
        head[0] = _FAILED
    announce(control_group(), f"dispatch: {operation}")
    dist.broadcast(head, src=0, group=step_group())
    numbers = head.tolist()
    if numbers[0] == _FAILED:
        raise_together(error, doing)
    return numbers


def _totals(reader: PreparedLoader) -> _BatchSizes | None:
    """Return the sizes of a reader's batches; None if they are not known in advance."""
    plan = reader.plan
    if plan.total is None or plan.share_of is None:
        return None
    even = max(plan.first, min(plan.uniform_until, plan.total))
    size, *rest = (plan.share_of(number).all for number in (plan.first, *range(even, plan.total)))
    if size is None or None in rest:
        return None
    return _BatchSizes(even, size, [count or 0 for count in rest])


def _parts(size: int, world_size: int) -> list[int]:
    """Return the number of samples of each rank, if `size` samples are divided evenly."""
    return [end - begin for begin, end in (local_slice(size, rank, world_size) for rank in range(world_size))]


class _TensorSpec:
    """Placeholder for a tensor in the structure of a batch that is sent."""

    __slots__ = ("dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _flatten(parts: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the structure of each part, and for each part the bytes of its tensors in one buffer."""
    described, buffers = [], []
    for part in parts:
        pieces: list[torch.Tensor] = []

        def place(leaf: Any, pieces: list[torch.Tensor] = pieces) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            pieces.extend([raw, raw.new_zeros(-len(raw) % _ALIGN)])
            return _TensorSpec(leaf)

        described.append(map_leaves(place, part))
        buffers.append(torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8))
    return described, buffers


def _filled(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([buffer, buffer.new_zeros(size - len(buffer))]) if len(buffer) < size else buffer


def _join(described: Any, buffer: torch.Tensor) -> Any:
    offset = 0

    def take(leaf: Any) -> Any:
        nonlocal offset
        if not isinstance(leaf, _TensorSpec):
            return copy.deepcopy(leaf)  # the user may change it, and the next batch may contain the same object
        begin, end = offset, offset + leaf.num_bytes
        offset = end + -end % _ALIGN
        return buffer[begin:end].view(leaf.dtype).view(leaf.shape)

    return map_leaves(take, described)
