"""Logs: what `self.log` makes of values, what the Trainer shows of them, and which rows the loggers get."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.model.data import Batch, Dealt, samples_of
from tests.model.trace import Refused

if TYPE_CHECKING:
    from tests.model.run import Run

# ---- where it may be called

STEPS = ("training_step", "validation_step")
BATCHES_OF_TRAINING = (
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
"""Hooks that log step values if nothing else is asked for."""
BATCHES_OF_VALIDATION = ("validation_step", "on_validation_batch_start", "on_validation_batch_end")
"""Hooks that log epoch values if nothing else is asked for."""
EPOCHS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)
"""Hooks in which there is no step: they log epoch values only."""
NOWHERE = ("on_train_end", "on_validation_end")
"""Some of the hooks in which nothing can be logged."""


Row: TypeAlias = tuple[int, tuple[tuple[str, float | str], ...]]
"""Row of the loggers: the step, and the values."""


@dataclass(frozen=True)
class Log:
    """A call of `self.log` in a method of the module, with its arguments.

    A batch hook logs the mean of its batch's sample numbers, another one the number of optimizer steps.

    Attributes:
        hook: the method.
        name: of the value.
        on_step: None leaves it to the place; so does `on_epoch`.
        on_epoch: see `on_step`.
        reduce_fx: "mean", "sum", "min" or "max".
        metric: log an object of torchmetrics that counts the sample numbers: "mean", "sum" or "max". All calls with
            the same word log the same object. "both" logs a collection by `log_dict`: "pair_mean" and "pair_sum".
        every: log in batches whose number, counted from 1, divides by this.
        nan_at: the number of the batch in which the value is nan.
        batch_size: as given; None: as many as the batch has.
        logger: False: the loggers do not get it.
        prog_bar: the progress bar shows it.
        sync_dist: by default an epoch value is of all ranks, and a step value the rank's own; True combines both, False
            neither. Objects always count for all ranks.
    """

    hook: str = "training_step"
    name: str = "seen"
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str = "mean"
    metric: str | None = None
    every: int = 1
    nan_at: int | None = None
    batch_size: int | None = None
    logger: bool | None = None
    prog_bar: bool = False
    sync_dist: bool | None = None

    def levels(self) -> tuple[bool, bool]:
        """Return whether it logs step values, and whether it logs epoch values."""
        training, validation = self.hook in BATCHES_OF_TRAINING, self.hook in BATCHES_OF_VALIDATION
        if not training and not validation and (self.hook not in EPOCHS or self.on_step or self.on_epoch is False):
            raise Refused("LogError", "not here, or not in this way")
        on_step = training if self.on_step is None else self.on_step
        on_epoch = not training if self.on_epoch is None else self.on_epoch
        if not on_step and not on_epoch:
            raise Refused("LogError", "neither a step value nor an epoch value")
        return on_step, on_epoch


def mean_of(batch: Batch) -> float:
    """Return what a step logs of a batch."""
    samples = samples_of(batch)
    return sum(samples) / len(samples)


# ---- what becomes of the values


@dataclass
class Counted:
    """What an object of torchmetrics has counted in one epoch of training, or in one validation."""

    kind: str
    samples: list[int] = field(default_factory=list)

    def value(self, samples: Sequence[int] | None = None) -> float:
        """Compute it over all samples that all ranks have counted in the epoch, or over these."""
        all_of_them = self.samples if samples is None else samples
        total = float(sum(all_of_them))
        return {"mean": total / len(all_of_them), "sum": total, "max": float(max(all_of_them))}[self.kind]


@dataclass(eq=False)
class Name:
    """One name that one hook logs, in one epoch of training or in one validation."""

    name: str
    on_step: bool
    on_epoch: bool
    reduce_fx: str = "mean"
    logger: bool = True
    prog_bar: bool = False
    sync_dist: bool | None = None
    counted: Counted | None = None
    suffix: str = ""
    values: list[tuple[int, float, int]] = field(default_factory=list)
    """Each value: of which rank, and for how many samples it counts."""
    fresh: dict[int, float] = field(default_factory=dict)
    """Each rank's last value that is in no row."""

    @property
    def step_name(self) -> str:
        """The name of the step value; where there are both, each has a name of its own."""
        return f"{self.name}{'_step' if self.on_epoch else ''}{self.suffix}"

    @property
    def epoch_name(self) -> str:
        return f"{self.name}{'_epoch' if self.on_step else ''}{self.suffix}"

    @property
    def plain_name(self) -> str:
        return self.name + self.suffix

    def add(self, rank: int, value: float, samples: int) -> None:
        self.values.append((rank, value, samples))
        self.fresh[rank] = value

    def add_all(self, value: float, dealt: Dealt) -> None:
        """Add one value that all ranks log. What is repeated does not count."""
        for rank, batch in enumerate(dealt.batches):
            if dealt.counts[rank]:
                self.add(rank, value, len(samples_of(batch)))

    def epoch_value(self, rank: int) -> float | None:
        """Reduce all values: in a mean each sample counts the same. An object computes its own.

        None where there is no value of this rank, and those of others do not count.
        """
        if self.counted is not None:
            return self.counted.value() if self.values else None
        values = [(value, samples) for of, value, samples in self.values if self.sync_dist is not False or of == rank]
        numbers = [value for value, _ in values]
        if not values:
            return None
        if self.reduce_fx == "mean":
            return sum(value * samples for value, samples in values) / sum(samples for _, samples in values)
        if any(math.isnan(number) for number in numbers):
            return math.nan
        return {"sum": sum, "min": min, "max": max}[self.reduce_fx](numbers)


@dataclass
class Book:
    """What was logged in training, or in one validation."""

    names: dict[tuple[str, str], Name] = field(default_factory=dict)
    suffix: str = ""  # of the names, where a validation has several loaders
    objects: dict[str, Counted] = field(default_factory=dict)

    def log(self, hook: str, calls: Iterable[Log], dealt: Dealt, batch_idx: int, step: int, ranks: int) -> list[Name]:
        """Log on all ranks what a hook logs, and return the names. Batches that are repeated do not count.

        An object counts a batch once, however often it is logged in it.
        """
        by_batch = hook not in EPOCHS
        due = [call for call in calls if call.hook == hook and (not by_batch or (batch_idx + 1) % call.every == 0)]
        for key, kind in {key: kind for call in due for key, kind, _ in objects_of(call)}.items():
            self.objects.setdefault(key, Counted(kind)).samples.extend(dealt.samples)
        logged: list[Name] = []
        for call in due:
            for key, _, name in objects_of(call) or [("", "", call.name)]:
                one = self.names.get((hook, name + self.suffix))
                if one is None:
                    given = call.reduce_fx, call.logger is not False, call.prog_bar, call.sync_dist
                    one = Name(name, *call.levels(), *given, self.objects.get(key), suffix=self.suffix)
                    self.names[hook, name + self.suffix] = one
                for rank in range(ranks):
                    if not by_batch:
                        one.add(rank, float(step), call.batch_size or 1)
                    elif dealt.counts[rank]:
                        batch = dealt.batches[rank]
                        value = mean_of(batch) if one.counted is None else one.counted.value(samples_of(batch))
                        nan = one.counted is None and batch_idx == call.nan_at
                        one.add(rank, math.nan if nan else value, call.batch_size or len(samples_of(batch)))
                logged.append(one)
        return logged

    def begin_epoch(self) -> None:
        """Forget what counts for an epoch value. A step value that is in no row yet goes into the next one."""
        for name in self.names.values():
            name.values = []
        for counted in self.objects.values():
            counted.samples = []

    def epoch_values(self, rank: int) -> dict[Name, float]:
        """Return the names that have an epoch value."""
        values = [(name, name.epoch_value(rank)) for name in self.names.values() if name.on_epoch]
        return {name: value for name, value in values if value is not None}

    def step_row(self, run: Run) -> dict[str, float]:
        """Return the step values for a row: of the names that were logged since the row before, each its last one.

        With `sync_dist=True` all ranks have their mean from then on.
        """
        row = dict[str, float]()
        for name in self.names.values():
            fresh, name.fresh = name.fresh, {}
            if not name.on_step or not fresh:
                continue
            if name.sync_dist:
                fresh = dict.fromkeys(range(run.case.ranks), sum(fresh.values()) / len(fresh))
                run.shown.step_value(name, fresh[run.rank], training=self is run.book)
            if run.rank in fresh and name.logger:
                row[name.step_name] = fresh[run.rank]
        return row


def objects_of(call: Log) -> list[tuple[str, str, str]]:
    """Return the objects that a call logs: which one it is, its kind, and the name of its value."""
    if call.metric == "both":
        return [("pair mean", "mean", "pair_mean"), ("pair sum", "sum", "pair_sum")]
    return [] if call.metric is None else [(call.metric, call.metric, call.name)]


@dataclass
class Shown:
    """What the Trainer shows: the last value of each name.

    Attributes:
        callback: `callback_metrics`: step values of training at once, epoch values when they are reduced.
        logged: `logged_metrics`: what the loggers have got.
        bar: `progress_bar_metrics`: what was logged with `prog_bar=True`.
    """

    callback: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    bar: dict[str, float] = field(default_factory=dict)

    def step_value(self, name: Name, value: float, training: bool) -> None:
        """Show a step value under its own name, and under the plain name until the epoch's value takes its place."""
        if name.on_step and training:
            self.callback[name.step_name] = self.callback[name.plain_name] = value
        if name.on_step and name.prog_bar:
            self.bar[name.step_name] = value

    def epoch_values(self, book: Book, rank: int) -> None:
        """Show epoch values under their own name, and under the plain name where they have a step value beside them."""
        for name, value in book.epoch_values(rank).items():
            self.callback[name.plain_name] = self.callback[name.epoch_name] = value
            if name.prog_bar:
                self.bar[name.epoch_name] = value

    def forget(self) -> None:
        """Forget all, at the end of the sanity check."""
        for values in (self.callback, self.logged, self.bar):
            values.clear()


# ---- the CSV file


def rows_on(rows: list[Row], saved: int, step: int) -> tuple[list[Row], list[Any]]:
    """Return the rows with which a run goes on in its file, and what of them may come again.

    Rows behind the checkpoint of later steps are removed. Those of its own step stay: not all of them come again.

    Args:
        rows: of the file.
        saved: how many of them were there when the checkpoint was saved.
        step: of the checkpoint.
    """
    again = [row for row in rows[saved:] if row[0] <= step]
    return rows[:saved] + again, [named(row) for row in again]


def write_again(again: list[Any], row: Row) -> bool:
    """Return whether a row is there already, and has now come again."""
    if named(row) not in again:
        return False
    again.remove(named(row))
    return True


def named(row: Row) -> tuple[int, frozenset[str]]:
    """Return what identifies a row: its step and its names."""
    return row[0], frozenset(name for name, _ in row[1])


def send_step_values(run: Run) -> None:
    """Send training's step values to the loggers, every `log_every_n_steps` optimizer steps."""
    every = run.case.settings.log_every_n_steps
    if every and run.step % every == 0 and run.step != run.sent_at:
        run.sent_at = run.step
        run.send(run.book.step_row(run), run.step)


def send_epoch_values(run: Run, book: Book) -> None:
    """Send the epoch values to the loggers when the epoch, or the validation, is over."""
    run.send({name.epoch_name: value for name, value in book.epoch_values(run.rank).items() if name.logger}, run.step)
