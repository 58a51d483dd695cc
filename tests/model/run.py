"""A fit from its start to its end: settings, hooks in their order, epochs, accumulation windows, and why it ends."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.model.checkpoints import Checkpoints, Newest, Saved, Saver
from tests.model.data import Batch, Combined, Data, Dealt, Draw, limit_in_batches
from tests.model.evaluation import check_sanity, evaluate
from tests.model.loaders import Loaders
from tests.model.logs import NOWHERE, Book, Log, Row, Shown, send_epoch_values, send_step_values, write_again
from tests.model.optimization import (
    ByHand,
    Optimization,
    Rates,
    Scheduler,
    check_manual,
    monitor_rates,
    monitor_rates_by_step,
    step_all,
    train_by_hand,
)
from tests.model.resume import Line, Start, ask, find_checkpoint
from tests.model.stopping import Stopper, Stopping
from tests.model.trace import Event, Refused, rounded
from tests.model.triggers import Triggers, agree_at_window_end, agree_now


@dataclass(frozen=True)
class Settings:
    """Arguments of the Trainer, with its names and defaults."""

    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    log_every_n_steps: int = 50
    reload_dataloaders_every_n_epochs: int = 0
    uneven: str = "stop"


@dataclass(frozen=True)
class Case:
    """A run: the settings, the data, and what happens.

    Attributes:
        settings: the Trainer's.
        train: the training data.
        val: the validation data; None: there is none.
        schedulers: those that `configure_optimizers` returns, in their order.
        ranks: how many processes run it.
        stop_at: `trainer.should_stop` is set in `on_train_batch_end` once so many optimizer steps are done.
        stop_on: the rank that sets it; None: all do. It is the same, since they agree.
        values: what the validations log as "val", one after the other, and again from the first.
        logs: what the module logs beside "val".
        rate_monitor: `logging_interval` of a LearningRateMonitor, "each" for its default; None: there is none.
        optimization: what the module does about optimization.
        checkpoints: of a ModelCheckpoint; None: there is none.
        second: of another one beside it.
        stopping: of EarlyStopping; None: there is none.
        source: who gives the loaders: "fit" gets them, the module's "hooks" make them, or "both": those of `fit` count.
        watch: which hooks the user has overridden: "all", the "callback"'s, or "few". It must change nothing.
    """

    settings: Settings = field(default_factory=Settings)
    train: Data | Combined = field(default_factory=lambda: Data(4))
    val: Data | Combined | None = None
    schedulers: tuple[Scheduler, ...] = ()
    ranks: int = 1
    stop_at: int | None = None
    stop_on: int | None = None
    values: tuple[float, ...] = (1.0,)
    logs: tuple[Log, ...] = ()
    rate_monitor: str | None = None
    optimization: Optimization = field(default_factory=Optimization)
    checkpoints: Checkpoints | None = None
    second: Checkpoints | None = None
    stopping: Stopping | None = None
    source: str = "fit"
    watch: str = "all"


LOOKS = ("on_train_epoch_start", "on_train_batch_start", "on_fit_end")
"""The hooks in which the callback looks which checkpoints are there."""
VIEWS = ("on_train_batch_end", "on_validation_end", "on_train_end")
"""The hooks in which the callback looks at `logged_metrics` and `progress_bar_metrics`, where something is logged."""


NOT_SAVED = (
    *("case", "order", "start", "rank", "events", "line", "newest"),
    *("max_epochs", "loaders"),  # of the settings
    *("triggers", "resumes", "rows_before", "again", "saved_book"),
    "by_hand",  # gradients that are accumulated by hand begin anew
)
"""What of a Run is no part of a checkpoint."""


class Broken(Exception):
    """What breaks a run off."""


def run(case: Case, order: Draw | None = None, rank: int = 0, start: Start | None = None) -> list[Event]:
    """Return all that is seen of a fit on one rank.

    All ranks do the same at the same time. They differ in the batches they see and in the values they log; rank 0 alone
    has loggers, and prepares data.

    Args:
        case: the run.
        order: the order of samples where they are shuffled. It is drawn; here it is given.
        rank: which one's events.
        start: what the process finds on the disk, what it is told to go on from, and where it is broken off.
    """
    it = Run(case, order or (lambda data, *_: data.in_sequence()), start or Start(), rank, case.ranks)
    try:
        it.fit()
        it.read_rows()
        ask(it)
    except Broken:
        if it.start.kills:  # rows that were not written yet are gone
            return it.events
    except Refused as refused:
        it.callback("on_exception", refused.kind)
        it.both("teardown", "fit")
        it.read_rows()
        it.note("-", "error", refused.kind, refused.early)
    it.start.disk.tables[it.table] = list(it.rows)
    return it.events


@dataclass
class Run:
    """The state of a fit, and what it does."""

    case: Case
    order: Draw
    start: Start
    rank: int = 0  # the one that is watched
    ranks: int = 1
    events: list[Event] = field(default_factory=list)
    epoch: int = 0  # the present one, or the one to come
    batch: int = 0  # batches of it that are done
    samples: int = 0  # that these had, on all ranks
    over: bool = False  # other ranks have come to the end of the epoch's data
    due: bool = False  # a validation follows the last window
    epochs_seen: int = 0  # `current_epoch`: it goes up when the epoch's hooks have run, also where it was cut short
    epochs_done: int = 0  # that came to their end
    step: int = 0
    batches_before: int = 0  # of earlier epochs
    closed: int = -1  # the step at which the run's end has ended its epoch early
    validated: bool = False  # since the last optimizer step
    validations: int = 0
    shown: Shown = field(default_factory=Shown)
    rows: list[Row] = field(default_factory=list)  # in the CSV file: the step, and the values
    book: Book = field(default_factory=Book)  # what was logged in training
    evaluation: Book | None = None  # the same of a validation that runs
    dealt: Dealt = field(default_factory=lambda: Dealt((), ()))  # the batches of the step that runs
    batch_idx: int = 0
    sent_at: int = 0  # the step whose step values were sent last
    evaluated_rows: int = 0  # rows of step values of validations
    monitored_at: int = -1  # the step whose rates were logged last
    had_loss: bool = False  # a batch was not skipped
    by_hand: ByHand = field(default_factory=ByHand)
    savers: list[Saver] = field(default_factory=list)
    newest: Newest | None = None
    stopper: Stopper | None = None
    line: Line = field(default_factory=Line)
    read: int = 0  # batches of data that goes on from one epoch to the next
    val_loaded: int | None = None  # the epoch in which validation's loaders were asked for, with reloading
    triggers: Triggers = field(default_factory=Triggers)
    resumes: bool = False  # the run goes on from a checkpoint
    saved_book: Book | None = None  # that of the checkpoint, until the hooks that run again have run
    table: int = -1  # the number of the CSV file
    rows_before: int | None = None  # how many came before a validation that was left, and are in its checkpoint
    again: list[Any] = field(default_factory=list)  # rows behind the checkpoint that may come again

    # ---- events

    @property
    def metrics(self) -> dict[str, float]:
        """What `callback_metrics` shows."""
        return self.shown.callback

    def note(self, owner: str, name: str, *args: Any) -> None:
        self.events.append(Event(owner, name, args, self.step, self.epochs_seen, rounded(self.metrics)))
        self.triggers.set_at(len(self.events) - 1, self.start)
        if len(self.events) - 1 == self.start.breaks_at:
            raise Broken

    def callback(self, hook: str, *args: Any) -> None:
        self.note("C", hook, *args)
        if hook in LOOKS and self.rank == 0:
            for saver in self.savers:
                self.note("D", "disk", *saver.seen(self.start.disk))
        if hook in VIEWS and self.case.logs:
            self.note("V", hook, rounded(self.shown.logged), rounded(self.shown.bar))

    def module(self, hook: str, *args: Any) -> None:
        self.note("M", hook, *args)
        self.log(hook)

    def both(self, hook: str, *args: Any) -> None:
        """Call a hook that callbacks and modules have: the callback's comes first."""
        self.callback(hook, *args)
        self.module(hook, *args)

    def transfer(self, batch: Batch, loader: int = 0) -> None:
        self.module("on_before_batch_transfer", batch, loader)
        self.module("transfer_batch_to_device", batch, loader)
        self.module("on_after_batch_transfer", batch, loader)

    # ---- logs

    def log(self, hook: str) -> None:
        """Log what a method of the module logs. Step values of training show at once, others are reduced later."""
        if hook in NOWHERE and any(call.hook == hook for call in self.case.logs):
            raise Refused("LogError", f"nothing can be logged in {hook}")
        book = self.book if self.evaluation is None else self.evaluation
        for name in book.log(hook, self.case.logs, self.dealt, self.batch_idx, self.step, self.case.ranks):
            if name.on_step and self.rank in name.fresh:
                self.shown.step_value(name, name.fresh[self.rank], training=self.evaluation is None)

    def send(self, values: dict[str, float], step: int) -> None:
        """Send a row to the loggers: the values and the epoch."""
        if values:
            self.shown.logged.update(values)
            self.send_row({**values, "epoch": self.epochs_seen}, step)

    def send_row(self, values: dict[str, float], step: int) -> None:
        """Send a row as it is. Rank 0 has the loggers."""
        if self.rank == 0:
            row = (step, rounded(values))
            if not write_again(self.again, row):
                self.rows.append(row)
            self.note("L", "log", *row)

    def read_rows(self) -> None:
        """Read the CSV file: its rows are the loggers', also after a resume."""
        self.events.append(Event("F", "csv", tuple(self.rows) if self.rank == 0 else (), 0, 0))

    # ---- the whole

    def fit(self) -> None:
        self.resolve()
        self.module("configure_callbacks")
        resumed = find_checkpoint(self)
        self.resumes = resumed is not None
        self.saved_book = deepcopy(self.book) if self.resumes else None
        if self.rank == 0:
            self.module("prepare_data")
        self.both("setup", "fit")
        self.module("configure_model")
        self.module("configure_optimizers")
        self.loaders.load()
        self.both("on_fit_start")
        if resumed is None:
            check_sanity(self)
        self.both("on_train_start")
        if resumed is not None:
            for saver in self.all_savers():
                saver.take_up(self, resumed)
        agree_now(self)
        while not self.is_finished():
            self.train_epoch()
        self.epochs_seen = max(self.epochs_seen, self.epoch + (self.closed == self.step))
        self.both("on_train_end")
        for saver in self.savers:
            saver.after_training(self)
        self.both("on_fit_end")
        self.both("teardown", "fit")

    def resolve(self) -> None:
        """Find out how long everything is; refuse settings that do not fit each other or the data."""
        s = self.case.settings
        without_epochs = 1000 if s.max_steps == -1 else -1
        self.max_epochs = without_epochs if s.max_epochs is None else s.max_epochs
        if s.min_epochs is not None and self.max_epochs != -1 and s.min_epochs > self.max_epochs:
            raise Refused("SettingError", "min_epochs is more than max_epochs", early=True)
        if s.min_steps is not None and s.max_steps != -1 and s.min_steps > s.max_steps:
            raise Refused("SettingError", "min_steps is more than max_steps", early=True)
        if s.check_val_every_n_epoch is None and isinstance(s.val_check_interval, float):
            raise Refused("SettingError", "a fraction of an epoch cannot be counted across epochs", early=True)
        self.loaders = Loaders(self)
        self.rates = Rates(self.case.schedulers, self.case.optimization.optimizers)
        if self.case.optimization.manual is not None:
            check_manual(s)

    # ---- checkpoints

    def move(self) -> None:
        """Go on with other ranks than the state was saved by. What is left of the epoch is dealt to them."""
        train, before, wanted = self.case.train.loaders[0], self.ranks, self.loaders.train_limit
        self.ranks = self.case.ranks
        for name in self.book.names.values():  # what rank 0 showed all show; what all logged is rank 0's
            name.fresh = dict.fromkeys(range(self.ranks), name.fresh[0]) if 0 in name.fresh else {}
            name.values = [(0, value, samples) for _, value, samples in name.values]
        if not self.samples:
            return
        limit = limit_in_batches(wanted, train.length(before, self.case.settings.uneven), "limit_train_batches")
        self.over = self.batch == len(train.deal(train.in_sequence(), before, self.case.settings.uneven)[:limit])
        # How ranks share a stream is seen when they read it, which a finished run does not do.
        if not (train.is_divided or self.over or (train.kind == "iterable" and before == 1 and self.is_finished())):
            raise Refused("DataError", "instep does not know how other ranks share such data", early=True)
        if train.is_divided:  # batches are counted as if the epoch had begun with these ranks
            size, limit = train.batch_size * self.ranks, self.loaders.train.limit
            self.batch = len(train.deal(train.in_sequence(), self.ranks, "stop")[:limit])
            if not self.over:  # those of a stream stay whole
                self.batch = self.samples // size if train.kind == "map" else -(-self.samples // size)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds. A wish to stop is no part of it, but the verdict of EarlyStopping is."""
        kept = {name: value for name, value in vars(self).items() if name not in NOT_SAVED}
        return deepcopy({**kept, "rows": self.rows[: self.rows_before]})

    @property
    def last_epoch(self) -> int:
        """The epoch of the last batch."""
        return self.epoch - 1 if self.samples == 0 and self.epoch else self.epoch

    @property
    def place(self) -> tuple[Any, ...]:
        return (self.epoch, self.samples, self.step, self.validated)

    def all_savers(self) -> list[Saver]:
        return self.savers if self.newest is None else [*self.savers, self.newest]

    def want_newest(self, saver: Saver) -> Newest | None:
        """Ask for the newest state, and return who saves it; None where nobody does, or the ModelCheckpoint may not."""
        newest = self.newest if saver.keeps_newest else None
        if newest is not None:
            newest.due = True
        return newest

    def settle_newest(self) -> None:
        if self.newest is not None:
            self.newest.settle(self)

    def save(self, new: Saved) -> Saved:
        self.forget_what_came_again()
        new = self.start.disk.add(new)
        self.start.disk.tables[self.table] = list(self.rows)
        if new.state is not None:
            self.note("S", "saved", self.step, self.samples == 0, self.epoch)
        return new

    # ---- the end

    def is_finished(self) -> bool:
        s = self.case.settings
        if not self.loaders.trains or (self.max_epochs != -1 and self.epochs_done >= self.max_epochs):
            return True
        if self.samples and self.closed != self.step and (self.step <= s.max_steps or s.max_steps == -1):
            return False  # resumed behind the last step, but before the epoch's end
        return (s.max_steps != -1 and self.step >= s.max_steps) or self.is_stopping()

    def is_stopping(self) -> bool:
        """Return whether the wish to stop is obeyed, which no later verdict undoes; it waits for a minimum."""
        s = self.case.settings
        wished = self.triggers.stops or (self.stopper is not None and self.stopper.stops)
        obeyed = wished and self.step >= (s.min_steps or 0) and self.epochs_done >= (s.min_epochs or 0)
        self.triggers.stops = self.triggers.stops or obeyed
        return obeyed

    # ---- epochs

    def train_epoch(self) -> None:
        s = self.case.settings
        self.loaders.begin_epoch()
        if not self.samples:
            self.forget_what_came_again()
        self.callback("on_train_epoch_start")
        if self.case.rate_monitor != "step" and not self.samples:  # else the epoch goes on
            monitor_rates(self, "epoch")
        self.module("on_train_epoch_start")
        self.forget_what_came_again()
        batches = self.deal_epoch(self.batch, self.samples)
        if not batches and not self.samples:
            raise Refused("DataError", "the epoch had no batch")
        complete, over = True, False
        if self.samples:  # the run goes on within the epoch, behind the training of a window
            self.report_and_validate()
            over = self.ends_here()
            complete = self.batch == len(batches) if over else True
        for begin in range(self.batch, len(batches) if not over else 0, s.accumulate_grad_batches):
            window = batches[begin : begin + s.accumulate_grad_batches]
            self.train_window(begin, window, begin + len(window) == len(batches))
            self.batch = begin + len(window)
            self.samples += sum(len(dealt.samples) for dealt in window)
            self.due = self.is_due(begin, self.batch)
            for saver in self.savers:
                saver.after_window(self, self.due or self.is_due_at_epoch_end(self.batch, len(batches)))
            self.settle_newest()
            if self.end_window():
                complete = self.batch == len(batches)
                break
        self.end_epoch(complete)

    def forget_what_came_again(self) -> None:
        """Forget what hooks have logged that a resume calls again: `on_train_start`, and within an epoch its first."""
        if self.saved_book is not None:
            self.book, self.saved_book = self.saved_book, None

    def deal_epoch(self, batch: int, samples: int) -> list[Dealt]:
        """Return the epoch's batches. So many of them, with so many samples, are done; by other ranks perhaps."""
        if self.over:
            return [Dealt((), ())] * batch
        return self.loaders.train.rest(self.epoch, self.read, batch, samples)

    def end_window(self) -> bool:
        """Log, validate and agree on what was asked for, after an optimizer step; return whether the run ends."""
        self.report_and_validate()
        agree_at_window_end(self)
        return self.ends_here()

    def report_and_validate(self) -> None:
        send_step_values(self)
        if self.due and not self.validated:
            self.validate()

    def ends_here(self) -> bool:
        return self.step == self.case.settings.max_steps or self.is_stopping()

    def is_due(self, begin: int, end: int) -> bool:
        """Return whether a validation is planned after a window."""
        loaders = self.loaders
        return loaders.validates and loaders.plan.due_after_window(self.epoch, self.batches_before, begin, end)

    def is_due_at_epoch_end(self, end: int, batches: int) -> bool:
        """Return whether the batch before `end` is the epoch's last, and a validation waits for it."""
        return self.loaders.validates and end == batches and self.loaders.plan.due_at_epoch_end(self.epoch, batches)

    def train_window(self, begin: int, window: list[Dealt], last: bool) -> None:
        """Train on the batches of one optimizer step; in manual optimization on one batch.

        Args:
            begin: the number of the first batch.
            window: the batches.
            last: they are the epoch's last.
        """
        given = self.case.optimization
        skipped = [given.skipped(begin + place) for place in range(len(window))]
        for place, dealt in enumerate(window):
            batch, batch_idx = dealt.batches[self.rank], begin + place
            self.transfer(batch)
            self.dealt, self.batch_idx = dealt, batch_idx
            self.callback("on_train_batch_start", batch, batch_idx)
            monitor_rates_by_step(self)
            self.module("on_train_batch_start", batch, batch_idx)
            self.module("training_step", batch, batch_idx)
            if given.manual is not None:
                train_by_hand(self, dealt, batch_idx, last)
            else:
                given.check_skip(batch_idx, self.case.ranks)
                self.backward(place == 0, batch_idx, skipped[place])
                if place == len(window) - 1:
                    step_all(self, batch_idx, window, skipped)
            outputs = given.outputs(batch_idx)
            self.callback("on_train_batch_end", outputs, batch, batch_idx)
            if self.step == self.case.stop_at:
                self.triggers.set("stop")
            self.module("on_train_batch_end", outputs, batch, batch_idx)

    def backward(self, first: bool, batch_idx: int, skipped: bool) -> None:
        """Zero the gradients where a window begins, and compute those of a batch, if it is not skipped."""
        for _ in range(self.case.optimization.optimizers if first else 0):
            self.both("on_before_zero_grad")
            self.module("optimizer_zero_grad", self.epoch, batch_idx)
        if not skipped:
            self.both("on_before_backward")
            self.module("backward")
            self.both("on_after_backward")
            self.had_loss = True

    def step_schedulers(self, interval: str, count: int) -> None:
        """Step the schedulers that are due after a step or an epoch. In manual optimization the module does it."""
        if self.case.optimization.manual is not None:
            return
        for number in self.rates.due(interval, count):
            args = self.rates.step(number, self.metrics)
            if args is not None:
                self.module("lr_scheduler_step", *args)

    def validate(self) -> None:
        """Validate, and agree on what was asked for meanwhile. One that is left is as if it had not begun."""
        shown, rows, evaluated = deepcopy(self.shown), len(self.rows), self.evaluated_rows
        if not evaluate(self, self.loaders.validation(), sanity=False):
            self.shown, self.evaluated_rows, self.validated, self.rows_before = shown, evaluated, False, rows
        agree_now(self)

    def end_epoch(self, complete: bool) -> None:
        """End an epoch. One that was cut short steps no scheduler; if a wish to stop did it, it validates once more."""
        if self.case.optimization.manual is None and not self.had_loss:
            raise Refused("HookError", "every batch so far was skipped: nothing was trained")
        if self.loaders.validates and not self.validated:
            due = self.loaders.plan.due_at_epoch_end(self.epoch, self.batch) if complete else self.is_stopping()
            if due:
                self.validate()
        self.shown.epoch_values(self.book, self.rank)
        self.both("on_train_epoch_end")
        self.shown.epoch_values(self.book, self.rank)
        send_epoch_values(self, self.book)
        manual = self.case.optimization.manual
        if manual is not None and manual.schedulers == "epoch":
            self.rates.halve_all()
        if complete:
            self.book.begin_epoch()
            self.step_schedulers("epoch", self.epoch + 1)
            self.epochs_done += 1
            self.epoch += 1
            self.batches_before += self.batch
            self.read = self.loaders.train.after(self.read, self.batch)
            self.batch, self.samples, self.over, self.closed = 0, 0, False, -1
            if self.stopper is not None:
                self.stopper.after_epoch(self)
            for saver in self.savers:
                saver.after_epoch(self)
        else:
            self.closed = self.step
            for saver in self.savers[:1]:
                saver.after_cut_epoch(self)
        self.settle_newest()
        self.epochs_seen += 1
        agree_now(self)
