"""One process reads for all, and sends each rank its part of every batch.

For data that every rank would read alike, or that one process alone can read. Only the reader's loader is iterated, so
random numbers, positions and states are its own, and the ranks' samples are known exactly.

What travels, over the CPU group: per batch a few numbers (the last one? how many samples for whom?) and one scatter of
bytes; what the bytes mean, and all that is not a tensor, only when it differs from the batch before.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from instep.data.base import PreparedLoader
from instep.data.sampler import share
from instep.distributed import broadcast_object, control_group, find_batch_size, gather_object, raise_together
from instep.distributed.nested import map_leaves
from instep.errors import DataError
from instep.state import PartialState
from instep.types import StateDict

_END, _BATCH, _FAILED = range(3)
_UNKNOWN = -1
_ALIGN = 16  # bytes; so that any dtype can be seen in the middle of a buffer


class _Step(NamedTuple):
    """What a rank has of a step: its part, the samples by rank (_UNKNOWN where they cannot be counted), the end."""

    batch: Any
    rows: list[int]
    last: bool


class DispatchLoader(PreparedLoader):
    """Batches that process 0 reads and sends to all.

    Every batch is split evenly over the ranks, or with `whole` each rank gets one of `world_size` batches. A rank
    without samples gets some of another's, to replay with weight 0. The position is the reader's: moving it is a
    collective, and rank 0's state is the whole one.

    In a batch tensors are sliced in dimension 0, and so are lists and tuples without tensors that are as long; the rest
    is sent as it is. Batches arrive on the CPU.

    Args:
        loader: the user's loader.
        make_reader: makes the source that process 0 reads, as one process would; called there only.
        rank: this rank.
        world_size: number of ranks that run in step.
        seed: what everything random is derived from.
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
        *,
        rank: int,
        world_size: int,
        seed: int,
        batch_size: int | None,
        whole: bool,
        even: bool,
        pin: bool,
    ) -> None:
        super().__init__(loader, rank=rank, world_size=world_size, seed=seed)
        self.batch_size = batch_size
        self._set_epochs = []  # the reader's business
        self._whole = whole
        self._group = world_size if whole else 1
        """The reader's batches in a step."""
        self._even = even
        self._pin = pin and torch.accelerator.is_available()
        self._ranks = gather_object(rank)  # of each process: more than one may share a rank
        self._reads = PartialState().process_index == 0
        self._reader: PreparedLoader | None = None
        self._num_batches: int | None = None
        self._given = 0
        self._pulled = 0  # batches of the epoch that the reader gave
        self._step = (-1, _Step(None, [], False))
        self._parts: list[Any] = []  # by rank: the step's structure, with a _Place for each tensor
        self._sent = b""

        def make(_: None) -> None:
            self._reader = make_reader()

        self._ask(make)

    def _ask(self, action: Callable[[Any], Any]) -> None:
        """Do something with the reader where it is; everywhere: learn where it stands then, or of its error."""
        error: Exception | None = None
        head = torch.empty(3, dtype=torch.int64)
        if self._reads:
            try:
                action(self._reader)
                assert self._reader is not None
                total = self._reader.num_batches
                head = torch.tensor([_BATCH, self._reader.first_batch, _UNKNOWN if total is None else total])
            except Exception as caught:  # noqa: BLE001  raised below, together with the other ranks
                error = caught
                head[0] = _FAILED
        dist.broadcast(head, src=0, group=control_group())
        status, first, total = head.tolist()
        if status == _FAILED:
            raise_together(error, "preparing the data on rank 0")
        self._pulled = first
        self._begin(-(-first // self._group))
        self._given = self.first_batch
        left = math.ceil((total - first) / self._group)
        self._num_batches = None if total == _UNKNOWN else self.first_batch + left

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    @property
    def reliable(self) -> bool:
        return False

    @property
    def even_batches(self) -> int:
        return 0

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
        number, step = self._step
        if number != batch_idx:
            return None
        rows = [int(count != 0) for count in step.rows] if _UNKNOWN in step.rows else step.rows
        return (rows[self.rank], sum(rows)) if any(rows) else None

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
        if not self._pending:
            self._enter(self.epoch, self.cycle)
        self._pending = False
        self.is_last = False
        steps = self._receive()
        step = next(steps, None)
        while step is not None and not self._over(step):
            following = None if self._even else next(steps, None)
            self.is_last = step.last or (following is not None and self._over(following))
            self._step = (self._given, step)
            self._given += 1
            yield step.batch
            step = next(steps, None) if self._even else following

    def _over(self, step: _Step) -> bool:
        """Whether this rank ends before the step."""
        return not self._even and step.last and step.rows[self.rank] == 0

    def _receive(self) -> Iterator[_Step]:
        """This rank's parts of the steps; all ranks ask for each at the same time."""
        read = self._read(self._reader) if self._reader is not None else iter(())
        status = _BATCH
        while status == _BATCH:
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
            except Exception as caught:  # noqa: BLE001  raised below, together with the other ranks
                error = caught
                head[0] = _FAILED
            dist.broadcast(head, src=0, group=control_group())
            status, last, changed, size, *rows = head.tolist()
            if status == _FAILED:
                raise_together(error, "reading a batch on rank 0")
            if status != _BATCH:
                return
            if changed:
                self._parts, self._sent = broadcast_object(described), sent
            mine = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
            if size:
                to_send = [_filled(buffers[rank], size) for rank in self._ranks] if self._reads else None
                dist.scatter(mine, to_send, src=0, group=control_group())
            yield _Step(_put_together(self._parts[self.rank], mine), rows, bool(last))
            if last:
                return

    def _read(self, reader: PreparedLoader) -> Iterator[tuple[list[Any], list[int], bool]]:
        """On process 0: the parts of each step by rank, the samples in them, and whether it is the last."""
        reader.history = (self.history + 1) * self._group  # with even=False the reader is a step ahead
        batches = iter(reader)
        while group := list(islice(batches, self._group)):
            self._pulled += len(group)
            sizes = [_count_rows(batch) for batch in group]
            if self._whole:
                replays = self.world_size - len(group)
                parts = group + [group[0]] * replays
                rows = [_UNKNOWN if size is None else size for size in sizes] + [0] * replays
            else:
                bounds = [share(sizes[0] or 0, rank, self.world_size) for rank in range(self.world_size)]
                parts = [_slice_rows(group[0], sizes[0], *((0, 1) if a == b else (a, b))) for a, b in bounds]
                rows = [end - begin for begin, end in bounds]
            yield parts, rows, reader.is_last
            if reader.is_last:
                return

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


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


def _count_rows(batch: Any) -> int | None:
    """Samples in a batch: by its first tensor; without tensors by its first list; None when it has neither."""
    size = find_batch_size(batch)
    if size is not None or isinstance(batch, (list, tuple)):
        return len(batch) if size is None else size
    values = batch.values() if isinstance(batch, Mapping) else ()
    return next((len(value) for value in values if isinstance(value, (list, tuple))), None)


def _slice_rows(data: Any, rows: int | None, begin: int, end: int) -> Any:
    """The part of a batch that has these rows."""
    if rows is None:
        raise DataError(
            f"rank 0 reads for all ranks, but its batch, a {type(data).__name__}, has no tensor and no list to split. "
            "Give batches of tensors, or dispatch=False"
        )
    if isinstance(data, (list, tuple)):
        if len(data) == rows and find_batch_size(data) is None:
            return data[begin:end]
        values = [_slice_rows(value, rows, begin, end) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    if isinstance(data, Mapping):
        mapping: Any = copy.copy(data)
        for key, value in data.items():
            mapping[key] = _slice_rows(value, rows, begin, end)
        return mapping
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        instance = copy.copy(data)
        for field in dataclasses.fields(data):
            # object's own setter: the class may be frozen
            object.__setattr__(instance, field.name, _slice_rows(getattr(data, field.name), rows, begin, end))
        return instance
    leaf: Any = data
    shape = getattr(leaf, "shape", ())
    if len(shape) == 0:
        return data
    if shape[0] != rows:
        raise DataError(
            f"rank 0 splits its batches over the ranks, but a batch of {rows} samples has a {type(leaf).__name__} of "
            f"shape {tuple(shape)}: its dimension 0 is not the sample. Give batches whose tensors all begin with the "
            "sample, or dispatch=False"
        )
    return leaf[begin:end]
