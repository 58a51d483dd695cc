"""Logging of metrics: how a value gets from `self.log` to the host, is reduced over ranks, and reaches the loggers.

`TrainModule.log` only appends its value to `MetricLog.buffer`. The loop drains the buffer outside any compiled region
into accumulators, one for each name and hook. Values stay on their device until `hand_over` packs all of them into one
`ScalarTransfer`. Sums are kept in float64 and added in the order of the batches, so that a mean is exact, the same for
every world size, and bit-identical after a resume. `Metrics` has the last value of each name, for callbacks and the
progress bar, and sends values to the loggers.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from instep.distributed import find_batch_size, gather_object
from instep.errors import LogError
from instep.state.rank_records import named_ranks
from instep.trainer.log_arguments import check_number, is_metric
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.distributed.metric_states import Counts

K = TypeVar("K")

MOST_HELD = 500
"""Number of batches after which logged values go to the host, if `log_every_n_steps` is not reached before."""

_BATCH_HOOKS_OF_TRAINING = {
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "backward",
}
_BATCH_HOOKS_OF_EVALUATION = {
    f"{prefix}_{suffix}"
    for stage in ("validation", "test")
    for prefix, suffix in ((stage, "step"), (f"on_{stage}", "batch_start"), (f"on_{stage}", "batch_end"))
}
_EPOCH_HOOKS = {"on_train_start", "on_train_epoch_start", "on_train_epoch_end"} | {
    f"on_{stage}_{when}" for stage in ("validation", "test") for when in ("start", "epoch_start", "epoch_end")
}


class ScalarTransfer:
    """Transfer of scalars to the host: one stacked copy per dtype and device. Only `floats` waits for a GPU.

    Args:
        values: 0-dim tensors; numbers are returned unchanged.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, value in enumerate(self.values):
            if isinstance(value, Tensor):
                spread: Any = value
                if hasattr(spread, "full_tensor"):  # the value is a DTensor, whose parts lie on several ranks
                    value = self.values[i] = spread.full_tensor()
                groups.setdefault((value.dtype, value.device), []).append(i)
        self._copies: list[tuple[list[int], Tensor]] = []
        self._events: list[torch.cuda.Event] = []  # one event for each copy from a CUDA device
        for (_, device), places in groups.items():
            packed = torch.stack([self.values[i] for i in places])
            if device.type == "cuda":
                packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)
            self._copies.append((places, packed))

    @property
    def ready(self) -> bool:
        """Whether `floats` returns without waiting for the device."""
        return all(event.query() for event in self._events)

    def floats(self) -> list[float]:
        """Wait for the transfer, and return the values in the order in which they were passed."""
        for event in self._events:
            event.synchronize()
        for places, packed in self._copies:
            for i, value in zip(places, packed.tolist(), strict=True):
                self.values[i] = value
        self._copies = []
        return [float(value) for value in self.values]


class Options(NamedTuple):
    """Arguments of a `self.log` call, without name, value and batch size.

    They must be the same in all calls for a name in one hook.
    """

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str = "mean"
    sync_dist: bool | None = None
    add_dataloader_idx: bool = True
    rank_zero_only: bool = False
    group: tuple[int, ...] | None = None  # ranks that the value is reduced over; None for all


Entry = tuple[str, Any, Options, "int | None"]


_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "min", "max")},
    "avg": "mean",
    torch.mean: "mean",
    **dict.fromkeys((torch.sum, sum), "sum"),
    **dict.fromkeys((torch.min, min), "min"),
    **dict.fromkeys((torch.max, max), "max"),
}


def reduction(name: str, reduce_fx: Any) -> str:
    """Return the standard name of a `reduce_fx`: a text such as `"mean"` or `"AVG"`, or a function such as `max`."""
    try:
        return _REDUCTIONS[reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx]
    except (KeyError, TypeError):
        raise LogError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): use 'mean', 'sum', 'min' or 'max'; for anything else "
            "log an object with update() and compute(), such as a torchmetrics Metric."
        ) from None


@dataclass
class Accumulator:
    """Sum in float64 of the values that one hook logs under one name.

    It also has the arguments of `self.log`, and the values that are not added yet.
    """

    name: str
    options: Options
    on_step: bool
    on_epoch: bool
    op: str
    order: int
    hook: str
    suffix: str = ""
    metric: Any = None
    # with several loaders: what the metric object has counted in this entry's loader, stored when that loader ends;
    # None before its end, and with one loader
    counts: Counts | None = None
    last: Any = None
    fresh: bool = False
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    total: float | None = None
    weight: float = 0.0
    from_checkpoint: bool = False  # whether the arguments are those of the program that saved the checkpoint

    @property
    def full_name(self) -> str:
        return self.name + self.suffix

    @property
    def epoch_key(self) -> tuple[str, str]:
        """Name of the epoch value and its hook, by which ranks match their sums."""
        return self.epoch_name, self.hook

    @property
    def shared(self) -> bool:
        """Whether the sums of all ranks are reduced to one epoch value.

        False for a metric object, which reduces its own state.
        """
        return self.metric is None and self.options.sync_dist is not False and not self.options.rank_zero_only

    @property
    def computes_together(self) -> bool:
        """Whether the metric object is computed over all ranks, so that each rank must take part."""
        return not self.options.rank_zero_only and bool(metric_states_module().with_parts(self.metric))

    @property
    def step_name(self) -> str:
        return f"{self.name}_step{self.suffix}" if self.on_epoch else self.full_name

    @property
    def epoch_name(self) -> str:
        return f"{self.name}_epoch{self.suffix}" if self.on_step else self.full_name

    @property
    def shown(self) -> tuple[str, ...]:
        """Names under which callbacks see a step value.

        With on_epoch, the step value is shown under the plain name too, until the epoch value takes this name.
        """
        return (self.step_name, self.full_name) if self.on_epoch else (self.full_name,)

    @property
    def names(self) -> set[str]:
        """Names under which loggers get the values of this accumulator."""
        return {*[self.step_name] * self.on_step, *[self.epoch_name] * self.on_epoch}

    def add(self, value: float, weight: float) -> None:
        # without samples the value may be nan, as a mean over an empty mask is, and nan times 0 is nan
        self.total = combine(self.op, self.total, value if self.op != "mean" else value * weight if weight else 0.0)
        self.weight += weight

    def held(self) -> AbstractContextManager[None]:
        """Return a context manager in which the metric object holds the counts that belong to this name."""
        return nullcontext() if self.counts is None else self.counts.held()

    def computed(self, shapes: Mapping[str, Any]) -> float:
        """Compute the metric object over all ranks.

        Collective; `shapes` are the shapes of list states on the other ranks.
        """
        with self.held(), metric_states_module().able_to_compute(self.metric, shapes, self.options.rank_zero_only):
            value = self.metric.compute()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
            check_number(self.name, value)
            return float(value)
        raise LogError(
            f"The `.compute()` return of the metric logged as {self.name!r} must be a tensor with one element or a "
            f"number. Found {value!r}. Log its parts: self.log_dict(metric.compute()), in an *_epoch_end hook."
        )

    def clear(self) -> None:
        self.values, self.weights, self.total, self.weight, self.counts = [], [], None, 0.0, None


def _smaller(a: float, b: float) -> float:
    return a if a <= b or math.isnan(a) else b


def _larger(a: float, b: float) -> float:
    return a if a >= b or math.isnan(a) else b


_COMBINE: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "min": _smaller,
    "max": _larger,
}


def combine(op: str, total: float | None, amount: float | None) -> float | None:
    """Combine an amount with a total by the reduction `op`.

    If the amount or the total is None, return the other one.
    """
    if total is None or amount is None:
        return amount if total is None else total
    return _COMBINE[op](total, amount)


def merge(parts: Sequence[tuple[str, float | None, float]]) -> float | None:
    """Reduce the (reduction, total, weight) of several ranks to one value; None if no rank has a value."""
    op = parts[0][0]
    total: float | None = None
    for _, amount, _ in parts:
        total = combine(op, total, amount)
    return final(op, total, sum(weight for _, _, weight in parts))


def final(op: str, total: float | None, weight: float) -> float | None:
    """Compute the reduced value from a total and a weight; None if there is no value."""
    if total is None:
        return None
    if op == "mean":
        return total / weight if weight else None
    return total


def merge_states(by_rank: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the log states of several ranks: sums are combined, and last values are those of the first rank."""
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for state in by_rank:
        for saved in state:
            known = merged.setdefault((saved["hook"], saved["dataloader_idx"], saved["key"]), saved)
            if known is not saved and saved["total"] is not None:
                known["total"] = combine(Options(*saved["options"]).reduce_fx, known["total"], saved["total"])
                known["weight"] += saved["weight"]
    return list(merged.values())


class NullBuffer(list[Entry]):
    """Buffer that drops every logged value, for `Trainer(barebones=True)`, which logs nothing, and for trials."""

    def append(self, entry: Entry) -> None:
        pass


class StepMetrics(NamedTuple):
    """Values of one step, to be sent to the loggers."""

    metrics: dict[str, float]
    step: int
    bar: dict[str, float]


class _Outstanding(NamedTuple):
    """Values that are being copied to the host: first values to add to epoch sums, then the latest step values."""

    transfer: ScalarTransfer
    held: list[tuple[Accumulator, list[float]]]
    fresh: list[Accumulator]
    step: int


@contextmanager
def _naming(
    values: Sequence[Any], held: Sequence[tuple[Accumulator, list[float]]], fresh: Sequence[Accumulator]
) -> Iterator[None]:
    """If values cannot be brought to the host, raise an error that names the value at fault."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, RuntimeError):
        names = [one.name for one, weights in held for _ in weights] + [one.name for one in fresh]
        for name, value in zip(names, values, strict=True):
            check_number(name, value)
        raise


def _check_alike(by_rank: Sequence[Collection[str]], what: str) -> None:
    """Raise a `LogError` on all ranks if a name that all ranks compute together is missing on one of them."""
    for name in sorted(set().union(*by_rank)):
        having = [rank for rank, names in enumerate(by_rank) if name in names]
        if len(having) < len(by_rank):
            lacking = [rank for rank in range(len(by_rank)) if rank not in having]
            others = sorted(set(by_rank[lacking[0]]))
            raise LogError(
                f"self.log({name!r}) is {what}, which all ranks do together: {named_ranks(having)} "
                f"{'log' if len(having) > 1 else 'logs'} it, and {named_ranks(lacking)} "
                f"{'do' if len(lacking) > 1 else 'does'} not (there: {', '.join(map(repr, others)) or 'none'}). Log "
                "the same names on every rank, or only on the main process with rank_zero_only=True."
            )


class MetricLog:
    """Log of one stage (train, validate, test).

    Args:
        stage: `train`, `validate`, `sanity_check`, `test`.
        world_size: processes that the epoch values are reduced over.
        num_loaders: number of loaders; with more than one, names end with `/dataloader_idx_<i>`.
        counts: whether this rank's values take part in reductions. If several ranks have the same data, only one of
            them counts.
        module: the module with the metric objects.
        warned: names of the hooks for which it was checked whether the number of samples in a batch can be known. Each
            hook is checked once, and a warning is given if the number cannot be known. None for no checks.
    """

    def __init__(
        self,
        stage: str,
        world_size: int = 1,
        num_loaders: int = 1,
        counts: bool = True,
        module: nn.Module | None = None,
        warned: set[str] | None = None,
    ) -> None:
        self.stage = stage
        self._warned = warned
        self._module = module
        self.buffer: list[Entry] = []
        self.batch: Any = None
        self.weight: float | None = None
        """Samples in this batch on this rank: 0 for a replayed batch, None if the batch itself must be looked at."""
        self.copies = False
        """Whether logged values must be copied, because the next replay of a CUDA graph overwrites their memory."""
        self.not_here: set[int] = set()
        """Ids of the metric objects that count for another stage, and cannot keep separate counts for this stage."""
        self._world_size = world_size
        self._num_loaders = num_loaders
        self._counts = counts
        self._dataloader_idx: int | None = None
        self._hook = ""
        self._accumulators: dict[tuple[str, int | None], dict[str, Accumulator]] = {}
        self._current: dict[str, Accumulator] = {}
        self._order = 0
        # (id of a metric object, suffix of a loader) -> value that the object has computed for this loader
        self._of_loaders: dict[tuple[int, str], float] = {}
        self._outstanding: _Outstanding | None = None
        # whether any rank averages step values over ranks; None until the ranks have told each other
        self._averages: bool | None = None
        self.step_values: dict[str, Any] = {}
        """The last step value of each name (a number or device tensor), for displays; a name is removed when an epoch
        value replaces its step value."""

    # ---- the hook that is running

    def enter(self, hook: str) -> str:
        """Record that `hook` is running from now on, and return the hook that ran before, for `leave`."""
        before = self._hook
        if self.buffer:
            self.drain()
        self._hook = hook
        self._select()
        return before

    def leave(self, before: str) -> None:
        """Collect what the running hook has logged, and set the running hook back to `before`."""
        if self.buffer:
            self.drain()
        self._hook = before
        self._select()

    def set_loader(self, index: int | None) -> None:
        """Set the index of the evaluation loader that batches come from; None if no loader is being read.

        If a metric object is logged under names with the loader's index, its counts are stored when a loader ends.
        After the last loader the metric object gets the sum of the stored counts, for names and hooks that concern all
        loaders.
        """
        if self._num_loaders > 1:
            ended = [one for one in self._objects() if one.suffix and one.counts is None]
            if ended:
                room = metric_states_module()
                counts = room.Counts(room.with_groups((one.metric for one in ended), self._module))
                for one in ended:
                    one.counts = counts
            if index is None:
                taken = {id(one.counts): one.counts for one in self._objects() if one.counts is not None}
                if taken:
                    first, *others = taken.values()
                    first.add_up(others)
            self._dataloader_idx = index
            self._select()

    def _objects(self) -> list[Accumulator]:
        """Return the accumulators whose metric object was logged in this epoch."""
        return [one for one in self._all() if one.metric is not None and one.weight]

    @property
    def metric_objects(self) -> list[Any]:
        """The metric objects that count in this epoch, and those that share their states."""
        objects = [one.metric for one in self._objects()]
        return metric_states_module().with_groups(objects, self._module) if objects else []

    def _select(self) -> None:
        self._current = self._accumulators.setdefault((self._hook, self._dataloader_idx), {})

    # ---- from the buffer into accumulators

    def drain(self) -> None:
        """Move the buffer's entries into their accumulators, without computing anything or waiting for the device."""
        current, weight = self._current, self.weight
        for name, value, options, batch_size in _copies(self.buffer) if self.copies else self.buffer:
            accumulator = current.get(name)
            if accumulator is None or accumulator.options != options:
                accumulator = self._accumulator(name, value, options)
            if accumulator.metric is not None:
                if value is not accumulator.metric:
                    self._replace(accumulator, value)
                # mark that the metric object has a value to compute in this epoch, even if this rank only repeats the
                # batch
                accumulator.weight = 1.0
            if weight == 0:
                continue
            if accumulator.metric is not None:
                value = getattr(value, "_forward_cache", None)
                if value is None:
                    continue
            elif accumulator.on_epoch:
                accumulator.values.append(value)
                accumulator.weights.append(self._weight(name, batch_size))
            accumulator.last = value
            accumulator.fresh = True
            if accumulator.on_step:
                for name in accumulator.shown:
                    self.step_values[name] = value
        self.buffer.clear()

    def _weight(self, name: str, batch_size: int | None) -> float:
        if batch_size is not None:
            return self._checked_size(batch_size)
        if self.weight is not None:
            return self.weight
        if self.batch is None:
            return 1.0
        if self._warned is not None and self._hook not in self._warned:
            # Imported late: only the first batch of a hook needs it
            from instep.distributed.uncounted import doubt_of_size

            self._warned.add(self._hook)
            if doubt := doubt_of_size(self.batch):
                warn_user(
                    f"self.log({name!r}) in {self._hook} does not know the samples in a batch, by which its mean is "
                    f"weighed: {doubt}. Give self.log(batch_size=...)"
                )
        size = find_batch_size(self.batch)
        return 1.0 if size is None else float(size)

    def _checked_size(self, batch_size: Any) -> float:
        try:
            weight = float(batch_size)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            weight = -1.0
        if 0 <= weight < math.inf:
            return weight
        raise LogError(f"self.log(batch_size={batch_size!r}) in {self._hook}: expected the number of samples.")

    def _accumulator(self, name: str, value: Any, options: Options) -> Accumulator:
        known = self._current.get(name)
        if known is not None and known.from_checkpoint:
            return self._with_arguments(known, options)
        if known is not None:
            changed = [
                f"{key}={old!r} then {new!r}"
                for key, old, new in zip(Options._fields, known.options, options, strict=True)
                if old != new
            ]
            raise LogError(
                f"self.log({name!r}) was called twice in {self._hook} with different arguments ({', '.join(changed)}). "
                "Use one set of arguments, or two names."
            )
        suffix = ""
        if self._dataloader_idx is not None:
            if not options.add_dataloader_idx:  # all loaders share one value, whose name has no loader index
                everywhere = self._accumulators.setdefault((self._hook, None), {})
                if name in everywhere:
                    known = self._current[name] = everywhere[name]
                    return known if known.options == options else self._accumulator(name, value, options)
            else:
                suffix = f"/dataloader_idx_{self._dataloader_idx}"
        on_step, on_epoch = self._defaults(name, options)
        check_number(name, value)
        metric = self._checked(name, value, suffix) if is_metric(value) else None
        op = reduction(name, options.reduce_fx)
        accumulator = Accumulator(name, options, on_step, on_epoch, op, self._order, self._hook, suffix, metric)
        self._check_names(accumulator)
        self._order += 1
        self._current[name] = accumulator
        if not options.add_dataloader_idx:
            self._accumulators.setdefault((self._hook, None), {})[name] = accumulator
        return accumulator

    def _check_names(self, new: Accumulator) -> None:
        """Raise LogError if two names become the same because of the endings `_step` and `_epoch`."""
        for one in self._all():
            alike = one.names & new.names if one.name != new.name and not one.from_checkpoint else ()
            for name in alike:
                raise LogError(
                    f"self.log({new.name!r}) and self.log({one.name!r}) both log {name!r}: what is logged with on_step "
                    "and on_epoch gets these two endings. Use another name for one of them."
                )

    def _checked(self, name: str, metric: Any, suffix: str) -> Any:
        """Return the metric object.

        Raise LogError if it also counts for another stage or loader, and cannot keep the counts apart.
        """
        elsewhere = id(metric) in self.not_here
        others = [one for one in self._objects() if one.metric is metric and one.suffix != suffix] if suffix else []
        if elsewhere or (others and not metric_states_module().with_parts(metric)):
            raise metric_states_module().not_apart(name, metric, "stage" if elsewhere else "loader")
        return metric

    def _replace(self, accumulator: Accumulator, value: Any) -> None:
        """Replace the metric object under a name. Raise LogError if the old one has counted in this epoch."""
        before, name = accumulator.metric, accumulator.name
        # A composition of metrics, such as `self.a + self.b`, may be replaced: it is a new object in each step. Its own
        # `_update_count` stays 0, since only its parts count.
        if not is_metric(value) or (accumulator.weight and getattr(before, "_update_count", 0)):
            raise metric_states_module().not_the_same(name, before, value)
        accumulator.metric = self._checked(name, value, accumulator.suffix)

    def _with_arguments(self, known: Accumulator, options: Options) -> Accumulator:
        """Set the arguments of this `self.log` call on a sum that was loaded from a checkpoint.

        If the reduction differs, clear the sum.
        """
        op = reduction(known.name, options.reduce_fx)
        if op != known.op:
            known.clear()
        for name in known.shown:
            self.step_values.pop(name, None)
        known.options, known.op, known.from_checkpoint = options, op, False
        known.on_step, known.on_epoch = self._defaults(known.name, options)
        return known

    def _defaults(self, name: str, options: Options) -> tuple[bool, bool]:
        hook, on_step, on_epoch = self._hook, options.on_step, options.on_epoch
        if on_step is False and on_epoch is False:
            raise LogError(f"self.log({name!r}, on_step=False, on_epoch=False) is not useful: leave one of them out.")
        if hook in _BATCH_HOOKS_OF_TRAINING:
            if on_step is False and not on_epoch:
                raise LogError(
                    f"self.log({name!r}, on_step=False) in {hook} logs nothing, since a training step logs no epoch "
                    "value by default. Add on_epoch=True."
                )
            return on_step is not False, bool(on_epoch)
        if hook in _BATCH_HOOKS_OF_EVALUATION:
            if on_epoch is False and not on_step:
                raise LogError(
                    f"self.log({name!r}, on_epoch=False) in {hook} logs nothing, since an evaluation logs no step "
                    "values by default. Add on_step=True."
                )
            return bool(on_step), on_epoch is not False
        if hook in _EPOCH_HOOKS:
            if on_step:
                raise LogError(f"self.log({name!r}, on_step=True) in {hook}: there is no step here; leave on_step out.")
            if on_epoch is False:
                raise LogError(f"self.log({name!r}, on_epoch=False) in {hook} logs nothing: leave on_epoch out.")
            return False, True
        raise LogError(
            f"self.log({name!r}) was called in {hook or 'a place outside the hooks'}, where nothing can be logged. "
            "Log in a step, in a batch hook, or in an *_epoch_start / *_epoch_end hook."
        )

    @property
    def callback_values(self) -> dict[str, Any]:
        """Step values that callbacks may watch: those of training only.

        In an evaluation, callbacks watch the epoch values.
        """
        return self.step_values if self.stage == "train" else {}

    def bar_values(self, on_device: bool = False) -> dict[str, Any]:
        """Return the last step values that were logged with `prog_bar=True`.

        Args:
            on_device: whether to include values on a device. The progress bar's thread leaves them out, since it must
                not wait for the device; it gets them after `hand_over`.
        """
        return {
            one.step_name: one.last
            for one in self._all()
            if one.options.prog_bar and one.on_step and one.step_name in self.step_values
            if one.last is not None and (on_device or not _on_device(one.last))
        }

    # ---- from accumulators to the host

    def _all(self) -> Iterable[Accumulator]:
        # List each accumulator once, since without add_dataloader_idx one accumulator is used for several loaders.
        return {
            id(one): one for of_hook in list(self._accumulators.values()) for one in list(of_hook.values())
        }.values()

    def hand_over(self, step: int, wait: bool = False, step_values: bool = True) -> list[StepMetrics]:
        """Start to copy all collected values to the host, and return the step values whose copies have arrived.

        On a CPU a copy arrives at once. On a GPU the values of the previous call are usually returned, so that the host
        does not wait; with `wait`, it waits for all values.

        Args:
            step: the step that the step values belong to.
            wait: whether to wait until all values have arrived.
            step_values: whether to transfer step values too; if not, they stay for a later call.
        """
        arrived = self._arrive()
        held: list[tuple[Accumulator, list[float]]] = []
        fresh: list[Accumulator] = []
        values: list[Any] = []
        for accumulator in self._all():
            if accumulator.values:
                held.append((accumulator, accumulator.weights))
                values += accumulator.values
                accumulator.values, accumulator.weights = [], []
        for accumulator in self._all() if step_values else ():
            if accumulator.fresh and accumulator.on_step:
                fresh.append(accumulator)
                values.append(accumulator.last)
            accumulator.fresh = False
        # Averaging over ranks is a collective. All ranks must make the same decision whether to enter it, so the
        # decision does not depend on whether this rank has a new value (a rank that replayed a batch has none) or
        # whether the device is ready.
        synced = step_values and self._world_size > 1 and self._any_syncs()
        if values or synced:
            with _naming(values, held, fresh):
                transfer = ScalarTransfer(values)
            self._outstanding = _Outstanding(transfer, held, fresh, step)
            if wait or synced or self._outstanding.transfer.ready:
                arrived += self._arrive(synced)
        return arrived

    def _syncs(self) -> Iterator[Accumulator]:
        return (s for s in self._all() if s.on_step and s.options.sync_dist and not s.options.rank_zero_only)

    def _synced_names(self) -> list[str]:
        """Return the names whose step values all ranks average, without those that only a group of ranks averages."""
        return [one.full_name for one in self._syncs() if one.options.group is None]

    def _any_syncs(self) -> bool:
        """Return True if any rank averages a step value over ranks.

        The first call is collective: the ranks tell each other.
        """
        mine = any(True for _ in self._syncs())
        if self._averages is None:
            pairs = gather_object((mine, self._synced_names()))
            self._averages = any(pair[0] for pair in pairs)
            _check_alike([pair[1] for pair in pairs], "averaged over ranks (sync_dist=True)")
        return mine or self._averages

    def bring_to_host(self, step: int) -> list[StepMetrics]:
        """Copy to the host what `state_dict` needs. The next `hand_over` still returns the step values."""
        return self.hand_over(step, wait=True, step_values=False)

    def _arrive(self, synced: bool = False) -> list[StepMetrics]:
        if self._outstanding is None:
            return []
        transfer, held, fresh, step = self._outstanding
        self._outstanding = None
        with _naming(transfer.values, held, fresh):
            floats = iter(transfer.floats())
        for accumulator, weights in held:
            for weight in weights:
                accumulator.add(next(floats), weight)
        metrics = {one.step_name: value for one, value in zip(fresh, floats, strict=True)}
        ours = {one.step_name: one for one in self._all() if one.on_step}
        if synced:
            mine = {one.step_name: metrics[one.step_name] for one in fresh if self._counts and one.options.sync_dist}
            groups = {one.step_name: one.options.group for one in fresh}
            pairs = gather_object((mine, self._synced_names()))
            by_rank = [pair[0] for pair in pairs]
            _check_alike([pair[1] for pair in pairs], "averaged over ranks (sync_dist=True)")
            for name, values in _by_name(by_rank).items():
                if (group := groups.get(name)) is not None:
                    values = [by_rank[rank][name] for rank in group if name in by_rank[rank]]
                if name in ours:  # other names are logged only by groups that this rank does not belong to
                    # From now on the mean over ranks is shown and saved.
                    metrics[name] = ours[name].last = sum(values) / len(values)
        if not metrics:
            return []
        # A step value that arrives late does not replace the epoch's value. A mean over ranks is always shown.
        for key, value in metrics.items():
            names = [name for name in ours[key].shown if name in self.step_values or ours[key].options.sync_dist]
            self.step_values.update(dict.fromkeys(names, value))
        logged = {name: value for name, value in metrics.items() if ours[name].options.logger is not False}
        return [StepMetrics(logged, step, {name: v for name, v in metrics.items() if ours[name].options.prog_bar})]

    def reduce(self, step: int, reset: bool) -> tuple[list[StepMetrics], list[EpochMetric]]:
        """Reduce the epoch values logged so far over ranks. Collective.

        Args:
            step: the step of those step values that are not yet copied to the host.
            reset: whether to clear all sums and reset the metric objects afterwards, for a new epoch.

        Returns:
            Step values that have arrived, and the epoch values in the order of their first `self.log`.
        """
        arrived = self.bring_to_host(step)
        accumulators = sorted((one for one in self._all() if one.on_epoch), key=lambda one: one.order)
        mine = [one for one in accumulators if one.shared and self._counts]
        local = {one.epoch_key: (one.op, one.total, one.weight) for one in mine}
        everywhere = [local]
        counted = [metric_states_module().counted(accumulators)]
        if self._world_size > 1:  # tell every rank, also one without a sample, what the others have logged
            objects = [
                one.full_name for one in accumulators if one.metric is not None and one.weight and one.computes_together
            ]
            triples = gather_object((local, counted[0], objects))
            everywhere, counted = [one[0] for one in triples], [one[1] for one in triples]
            _check_alike([one[2] for one in triples], "a metric object")
        by_name = _by_name(counted)
        shapes = {name: dict(ChainMap(*(own for own, _ in parts))) for name, parts in by_name.items()}
        empty = {name for name, parts in by_name.items() if not any(updates for _, updates in parts)}
        shared = {name: merge(parts) for name, parts in _by_name(everywhere).items()}
        computed = self._computed([one for one in accumulators if one.metric is not None and one.weight], shapes, empty)
        result: list[EpochMetric] = []
        for one in accumulators:
            if one.metric is not None:
                value = computed.get(one.epoch_key)
            elif one.epoch_key in shared:
                value = shared.pop(one.epoch_key)
                if one.options.group is not None:
                    parts = [everywhere[rank].get(one.epoch_key) for rank in one.options.group]
                    value = merge([part for part in parts if part is not None])
            else:
                value = final(one.op, one.total, one.weight)
            if value is not None:
                result.append(EpochMetric(one.epoch_name, value, one.options, one.full_name, self._loaders_of(one)))
        if reset:
            # Also reset metric objects without an epoch value, since they have counted in this epoch. Reset only after
            # all are computed, since one object may be a part of another.
            if objects := self.metric_objects:
                metric_states_module().reset_metrics(objects)
            self._of_loaders.clear()
            for one in self._all():
                one.clear()
        # Include names that only other ranks logged, so that all ranks decide by the same values.
        result += [
            EpochMetric(name, value, Options(), name) for (name, _), value in shared.items() if value is not None
        ]
        return arrived, result

    def _computed(
        self, accumulators: list[Accumulator], shapes: Mapping[str, Any], empty: Collection[str]
    ) -> dict[tuple[str, str], float]:
        """Compute each metric object once, for all names of one loader.

        `empty` has the names of metric objects that no rank has updated; warn if the value of one of them is nan.
        """
        values: dict[tuple[int, str], float] = dict(self._of_loaders)
        result: dict[tuple[str, str], float] = {}
        for one in accumulators:
            of_loader = one.counts is not None
            key = id(one.metric), one.suffix if of_loader else ""
            if key not in values:
                values[key] = one.computed(shapes.get(one.epoch_name, {}))
                if one.epoch_name in empty and math.isnan(values[key]):
                    metric_states_module().warn_of_none(one.metric, one.epoch_name)
            if of_loader:  # keep the value for later calls: this loader has ended, so the value cannot change
                self._of_loaders[key] = values[key]
            result[one.epoch_key] = values[key]
        return result

    def _loaders_of(self, accumulator: Accumulator) -> frozenset[int] | None:
        """Return the indices of the loaders during which a value was logged.

        Return None if the value was logged outside of loaders, or if its name includes the loader's index.
        """
        if accumulator.options.add_dataloader_idx:
            return None
        places = self._accumulators.items()
        found = {index for (_, index), of_hook in places if of_hook.get(accumulator.name) is accumulator}
        return frozenset(index for index in found if index is not None) or None

    # ---- resume

    def state_dict(self, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return this rank's sums of the running epoch and last step values; call it after `bring_to_host`.

        Args:
            metrics: the module's metric objects by name; their counts are not part of this state.
        """
        names = {id(metric): name for name, metric in metrics.items()}
        return [
            {
                "hook": hook,
                "dataloader_idx": dataloader_idx,
                "key": key,
                "options": list(accumulator.options),
                "total": accumulator.total,
                "weight": accumulator.weight,
                "last": None if accumulator.last is None or not accumulator.on_step else float(accumulator.last),
                "fresh": accumulator.fresh,
                "shown": [name for name in accumulator.shown if name in self.step_values],
                "metric": names.get(id(accumulator.metric)),
            }
            for (hook, dataloader_idx), accumulators in self._accumulators.items()
            for key, accumulator in accumulators.items()
            if (accumulator.metric is None or id(accumulator.metric) in names)
            and (accumulator.weight or accumulator.total is not None or accumulator.last is not None)
        ]

    def load_state_dict(self, state_dict: list[dict[str, Any]], metrics: Mapping[str, Any]) -> None:
        """Restore the sums of an epoch that was interrupted.

        Args:
            state_dict: state of a log of the same stage.
            metrics: the module's metric objects by name.
        """
        for saved in state_dict:
            if saved["metric"] is not None and saved["metric"] not in metrics:
                continue
            self._hook, self._dataloader_idx = saved["hook"], saved["dataloader_idx"]
            self._select()
            known = self._current.get(saved["key"])
            given: list[Any] = [tuple(one) if isinstance(one, list) else one for one in saved["options"]]
            options = Options(*given)
            accumulator = known or self._accumulator(saved["key"], 0.0, options)
            accumulator.from_checkpoint = known is None or known.from_checkpoint
            accumulator.clear()  # drop what hooks have logged since this run's start: the restored sums include it
            accumulator.total, accumulator.weight = saved["total"], saved["weight"]
            accumulator.metric = None if saved["metric"] is None else metrics[saved["metric"]]
            if saved["last"] is not None:
                accumulator.last, accumulator.fresh = saved["last"], saved["fresh"]
                self.step_values.update(dict.fromkeys(saved.get("shown", ()), accumulator.last))
        self._hook, self._dataloader_idx = "", None
        self._select()


class EpochMetric(NamedTuple):
    """One reduced epoch value.

    `plain` is the name without the ending "_epoch", which distinguishes epoch values from step values. `loaders` are
    the indices of the loaders that the value is for; None if it is for all loaders, or for the loader in the name.
    """

    name: str
    value: float
    options: Options
    plain: str
    loaders: frozenset[int] | None = None


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def metric_states_module() -> ModuleType:
    """Return the module that knows the states of metric objects. It is imported here, since only a run needs it."""
    from instep.distributed import metric_states

    return metric_states


def _copies(entries: Iterable[Entry]) -> Iterator[Entry]:
    for name, value, options, batch_size in entries:
        yield name, value.clone() if isinstance(value, Tensor) else value, options, batch_size


def _by_name(parts: Iterable[dict[K, Any]]) -> dict[K, list[Any]]:
    names: dict[K, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            names.setdefault(name, []).append(value)
    return names
