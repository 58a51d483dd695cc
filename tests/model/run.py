"""A fit from its start to its end: settings, hooks in their order, epochs, optimizer windows, and why it ends."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.model.checkpoints import Checkpoints, Newest, Saved, Saver
from tests.model.data import Batch, Data, Dealt, Order, expected_batches, limit_in_batches
from tests.model.evaluation import Plan, evaluate
from tests.model.logs import Log, Name, mean_of
from tests.model.optimization import Rate, Scheduler, sample_weights
from tests.model.resume import Line, Start, find
from tests.model.stopping import Stopper, Stopping
from tests.model.trace import Event, Refused, rounded


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
    log_every_n_steps: int = 50
    uneven: str = "stop"


@dataclass(frozen=True)
class Case:
    """A run: the settings, the data, and what happens.

    Attributes:
        settings: the Trainer's.
        train: the training data.
        val: the validation data; None: there is none.
        scheduler: or None.
        ranks: how many processes run it.
        stop_at: `trainer.should_stop` is set in `on_train_batch_end` once so many optimizer steps are done.
        stop_on: the rank that sets it; None: all do. It is the same, since they agree.
        values: what the validations log as "val", one after the other, and again from the first.
        log: what `training_step` logs as "seen"; None: nothing.
        val_log: what `validation_step` logs as "val_seen", in epoch values.
        checkpoints: of a ModelCheckpoint; None: there is none.
        second: of another one beside it.
        stopping: of EarlyStopping; None: there is none.
        watch: which hooks the user has overridden: "all", the "callback"'s, or "few". It must change nothing.
    """

    settings: Settings = field(default_factory=Settings)
    train: Data = field(default_factory=lambda: Data(4))
    val: Data | None = None
    scheduler: Scheduler | None = None
    ranks: int = 1
    stop_at: int | None = None
    stop_on: int | None = None
    values: tuple[float, ...] = (1.0,)
    log: Log | None = None
    val_log: Log | None = None
    checkpoints: Checkpoints | None = None
    second: Checkpoints | None = None
    stopping: Stopping | None = None
    watch: str = "all"


LOOKS = ("on_train_epoch_start", "on_train_batch_start", "on_fit_end")
"""The hooks in which the callback looks which checkpoints are there."""


NOT_SAVED = (
    *("case", "order", "start", "events", "line", "newest"),
    *("max_epochs", "trains", "limit", "val_batches", "plan"),  # of the settings
    *("asked_to_stop", "noted", "agreed"),
)
"""What of a Run is no part of a checkpoint."""


class Broken(Exception):
    """What breaks a run off."""


def run(case: Case, order: Order | None = None, rank: int = 0, start: Start | None = None) -> list[Event]:
    """Return all that is seen of a fit on one rank.

    All ranks do the same at the same time. They differ in the batches they see and in the values they log; rank 0 alone
    has loggers, and prepares data.

    Args:
        case: the run.
        order: the order of the training samples where they are shuffled. It is drawn; here it is given.
        rank: which one's events.
        start: what the process finds on the disk, what it is told to go on from, and where it is broken off.
    """
    it = Run(case, order or case.train.in_sequence, start or Start(), rank)
    try:
        it.fit()
        it.ask()
    except Broken:
        pass
    except Refused as refused:
        it.callback("on_exception", refused.kind)
        it.both("teardown", "fit")
        it.note("-", "error", refused.kind, refused.early)
    return it.events


@dataclass
class Run:
    """The state of a fit, and what it does."""

    case: Case
    order: Order
    start: Start
    rank: int = 0  # the one that is watched
    events: list[Event] = field(default_factory=list)
    epoch: int = 0  # the present one, or the one to come
    batch: int = 0  # batches of it that are done
    epochs_seen: int = 0  # `current_epoch`: it goes up when the epoch's hooks have run, also where it was cut short
    epochs_done: int = 0  # that came to their end
    step: int = 0
    batches_before: int = 0  # of earlier epochs
    validated: bool = False  # since the last optimizer step
    validations: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    savers: list[Saver] = field(default_factory=list)
    newest: Newest | None = None
    stopper: Stopper | None = None
    line: Line = field(default_factory=Line)
    logged: Name | None = None  # what this epoch's training steps have logged
    fresh: dict[int, float] = field(default_factory=dict)  # each rank's last step value that was not yet sent
    asked_to_stop: bool = False
    noted: bool = False  # the last window's end has noted the wish to stop
    agreed: bool = False  # the loop knows of the wish

    # ---- events

    def note(self, owner: str, name: str, *args: Any) -> None:
        self.events.append(Event(owner, name, args, self.step, self.epochs_seen, rounded(self.metrics)))
        if len(self.events) - 1 == self.start.breaks_at:
            raise Broken

    def callback(self, hook: str, *args: Any) -> None:
        self.note("C", hook, *args)
        if hook in LOOKS and self.rank == 0:
            for saver in self.savers:
                self.note("D", "disk", *saver.seen(self.start.disk))

    def module(self, hook: str, *args: Any) -> None:
        self.note("M", hook, *args)

    def both(self, hook: str, *args: Any) -> None:
        """Call a hook that callbacks and modules have: the callback's comes first."""
        self.callback(hook, *args)
        self.module(hook, *args)

    def transfer(self, batch: Batch) -> None:
        self.module("on_before_batch_transfer", batch)
        self.module("transfer_batch_to_device", batch)
        self.module("on_after_batch_transfer", batch)

    # ---- logs

    def log_training(self, dealt: Dealt) -> None:
        """Log a training step's value. A step value shows at once, an epoch value when the epoch ends."""
        if self.case.log is None:
            return
        if self.logged is None:
            self.logged = Name.of("seen", self.case.log, training=True)
        self.logged.add(dealt, mean_of)
        if self.logged.on_step:
            own = {rank: mean_of(batch) for rank, batch in enumerate(dealt.batches) if dealt.counts[rank]}
            self.fresh.update(own)
            if self.rank in own:
                self.show_step_value(own[self.rank])

    def send_step_values(self) -> None:
        """Send the last batch's step values to the loggers, every `log_every_n_steps` optimizer steps.

        With `sync_dist=True` all ranks have their mean from then on.
        """
        every = self.case.settings.log_every_n_steps
        if not every or self.step % every or self.logged is None or not self.logged.on_step:
            return
        fresh, self.fresh = self.fresh, {}
        if self.logged.sync_dist and fresh:
            fresh = dict.fromkeys(range(self.case.ranks), sum(fresh.values()) / len(fresh))
        if self.rank in fresh:
            self.show_step_value(fresh[self.rank])
            self.send({self.logged.step_name: fresh[self.rank]})

    def show_step_value(self, value: float) -> None:
        """Show a step value under its own name, and under the plain name until the epoch's value takes its place."""
        assert self.logged is not None
        self.metrics[self.logged.step_name] = self.metrics[self.logged.name] = value

    def show_epoch_values(self, names: Iterable[Name]) -> None:
        """Show epoch values under their own name, and under the plain name where they have a step value beside them."""
        for name in names:
            value = name.epoch_value(self.rank)
            if value is not None:
                self.metrics[name.name] = self.metrics[name.epoch_name] = value

    def send_epoch_values(self, names: Iterable[Name]) -> None:
        values = {name.epoch_name: name.epoch_value(self.rank) for name in names}
        there = {name: value for name, value in values.items() if value is not None}
        if there:
            self.send(there)

    def send(self, values: dict[str, float]) -> None:
        """Send a row to the loggers, which rank 0 has: the values and the epoch, at the present step."""
        if self.rank == 0:
            self.note("L", "log", self.step, rounded({**values, "epoch": self.epochs_seen}))

    # ---- the whole

    def fit(self) -> None:
        self.resolve()
        self.module("configure_callbacks")
        resumed = self.find_checkpoint()
        if self.rank == 0:
            self.module("prepare_data")
        self.both("setup", "fit")
        self.module("configure_model")
        self.module("configure_optimizers")
        self.both("on_fit_start")
        if resumed is None:
            self.sanity_check()
        self.both("on_train_start")
        if resumed is not None:
            for saver in self.all_savers():
                saver.take_up(self, resumed)
        while not self.is_finished():
            self.train_epoch()
        self.both("on_train_end")
        for saver in self.savers:
            saver.after_training(self)
        self.both("on_fit_end")
        self.both("teardown", "fit")

    def resolve(self) -> None:
        """Find out how long everything is; refuse settings that do not fit each other or the data."""
        s, train, val = self.case.settings, self.case.train, self.case.val
        without_epochs = 1000 if s.max_steps == -1 else -1
        self.max_epochs = without_epochs if s.max_epochs is None else s.max_epochs
        if s.min_epochs is not None and self.max_epochs != -1 and s.min_epochs > self.max_epochs:
            raise Refused("SettingError", "min_epochs is more than max_epochs", early=True)
        if s.min_steps is not None and s.max_steps != -1 and s.min_steps > s.max_steps:
            raise Refused("SettingError", "min_steps is more than max_steps", early=True)
        if s.check_val_every_n_epoch is None and isinstance(s.val_check_interval, float):
            raise Refused("SettingError", "a fraction of an epoch cannot be counted across epochs", early=True)
        # overfit_batches stands in place of both limits.
        limit = s.overfit_batches or s.limit_train_batches
        self.trains = limit != 0
        length = train.length(self.case.ranks, s.uneven)
        self.limit = limit_in_batches(limit, length, "limit_train_batches")
        if length == 0 and self.trains:
            raise Refused("DataError", "the training data says that it has no batch", early=True)
        self.val_batches: list[Dealt] | None = None
        val_limit = s.overfit_batches or s.limit_val_batches
        if val is not None and val_limit != 0:
            # An evaluation leaves no sample out: a rank that has no more waits for the others.
            limit = limit_in_batches(val_limit, val.length(self.case.ranks, "join"), "limit_val_batches")
            self.val_batches = val.deal(val.in_sequence(), self.case.ranks, "join")[:limit]
            if self.trains:
                self.plan = Plan(s, expected_batches(length, self.limit))
        self.rate = Rate(self.case.scheduler)

    # ---- checkpoints

    def find_checkpoint(self) -> Saved | None:
        """Begin a run, or go on with the one that `ckpt_path` means; nothing is left to be done twice."""
        case, start = self.case, self.start
        self.stopper = None if case.stopping is None else Stopper(case.stopping)
        self.savers = [Saver(given) for given in (case.checkpoints, case.second) if given is not None]
        if any(saver.given.save_last == "link" for saver in self.savers):
            raise Refused("SettingError", "'last' is found by a look at the disk, so there is no link", early=True)
        if len({saver.given.key for saver in self.savers}) < len(self.savers):
            raise Refused("SettingError", "two ModelCheckpoints with one key", early=True)
        if start.ckpt_path in ("auto", "last") and any(saver.keeps_newest for saver in self.savers):
            self.newest = Newest(self.savers[0].given.folder)
        folders = [saver.given.folder for saver in self.savers]
        found = find(start.disk, start.ckpt_path, self.savers, to_train=True)
        if found is None:
            self.line = start.disk.begin(folders)
            return None
        self.line = start.disk.go_on(found, folders)
        assert found.state is not None
        vars(self).update(deepcopy(found.state))
        self.epochs_seen = self.epoch
        return found

    def ask(self) -> None:
        """Say whose weights `validate` takes after the fit: in this process, and in one that has not trained."""
        line = self.line if self.step else None
        for name, of in (("validate", line), ("validate again", None)):
            for meant in self.start.asks:
                try:
                    found = find(self.start.disk, meant, self.savers, to_train=False, line=of)
                except Refused as refused:
                    self.events.append(Event("-", name, (meant, refused.kind), 0, 0))
                else:
                    self.events.append(Event("-", name, (meant, found and found.name), 0, 0))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds. A wish to stop is no part of it, but the verdict of EarlyStopping is."""
        return deepcopy({name: value for name, value in vars(self).items() if name not in NOT_SAVED})

    @property
    def last_epoch(self) -> int:
        """The epoch of the last batch."""
        return self.epoch - 1 if self.batch == 0 and self.epoch else self.epoch

    @property
    def place(self) -> tuple[Any, ...]:
        return (self.epoch, self.batch, self.step, self.validated)

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
        new = self.start.disk.add(new)
        if new.state is not None:
            self.note("S", "saved", self.step, self.batch == 0)
        return new

    def superseded_by(self, by: Saver, new: Saved) -> list[Saved]:
        """Return what a newer state makes needless: the newest one before, and what is kept elsewhere as the newest."""
        if self.newest is None:
            return []
        gone = list(self.newest.kept)
        for saver in self.savers:
            if saver is not by and saver.given.monitor is not None and not saver.given.save_last:
                keep = saver.to_keep([*saver.kept, new])
                gone += [one for one in saver.kept if one not in keep]
        return gone

    def delete(self, gone: list[Saved], by: Saver) -> None:
        """Delete checkpoints. Where the newest of a saver goes, a newer one is there."""
        self.start.disk.delete(gone)
        for saver in [by] if self.newest is None else self.all_savers():
            saver.kept = [one for one in saver.kept if one not in gone]
            saver.last = by.last if self.newest is not None and saver.last in gone else saver.last

    def sanity_check(self) -> None:
        """Run a few validation batches before the training; -1 runs all. What they log is forgotten."""
        steps = self.case.settings.num_sanity_val_steps
        if self.val_batches is None or steps == 0:
            return
        self.callback("on_sanity_check_start")
        evaluate(self, self.val_batches if steps == -1 else self.val_batches[:steps], sanity=True)
        self.callback("on_sanity_check_end")
        self.metrics.clear()

    # ---- the end

    def is_finished(self) -> bool:
        s = self.case.settings
        if s.max_steps != -1 and self.step >= s.max_steps:
            return True
        if self.max_epochs != -1 and self.epochs_done >= self.max_epochs:
            return True
        return not self.trains or self.is_stopping()

    def is_stopping(self) -> bool:
        """Return whether the wish to stop is obeyed: it waits for `min_steps` and `min_epochs`."""
        s = self.case.settings
        wished = self.agreed or (self.stopper is not None and self.stopper.stops)
        return wished and self.step >= (s.min_steps or 0) and self.epochs_done >= (s.min_epochs or 0)

    def agree_at_window_end(self) -> None:
        """Agree on what was asked for when the last window ended, as with `Trainer(trigger_every=1)`."""
        self.agreed = self.agreed or self.noted
        self.noted = self.asked_to_stop

    def agree_now(self) -> None:
        """Agree on all that was asked for, as at the end of a validation and of an epoch."""
        self.agreed = self.agreed or self.asked_to_stop

    # ---- epochs

    def train_epoch(self) -> None:
        s, train = self.case.settings, self.case.train
        # overfit_batches takes the data in sequence.
        order = self.order if train.shuffle and not s.overfit_batches else train.in_sequence
        batches = train.deal(order(self.epoch), self.case.ranks, s.uneven)[: self.limit]
        self.both("on_train_epoch_start")
        if not batches:
            raise Refused("DataError", "the epoch had no batch")
        complete = True
        if self.batch:  # the run goes on within the epoch, behind the training of a window
            self.end_window(self.batch)
        for begin in range(self.batch, len(batches), s.accumulate_grad_batches):
            window = batches[begin : begin + s.accumulate_grad_batches]
            self.train_window(begin, window)
            self.batch = begin + len(window)
            for saver in self.savers:
                due = self.is_due(self.batch) or self.is_due_at_epoch_end(self.batch, len(batches))
                saver.after_window(self, due)
            self.settle_newest()
            self.end_window(self.batch)
            if self.step == s.max_steps or self.is_stopping():
                complete = self.batch == len(batches)
                break
        self.end_epoch(complete)

    def end_window(self, end: int) -> None:
        """Do what follows an optimizer step: log, validate, agree on what was asked for."""
        self.send_step_values()
        if self.is_due(end) and not self.validated:
            self.validate()
        self.agree_at_window_end()

    def is_due(self, end: int) -> bool:
        """Return whether a validation is planned after the window that ends with this batch."""
        begin = (end - 1) // self.case.settings.accumulate_grad_batches * self.case.settings.accumulate_grad_batches
        return self.val_batches is not None and self.plan.due_after_window(self.epoch, self.batches_before, begin, end)

    def is_due_at_epoch_end(self, end: int, batches: int) -> bool:
        """Return whether the batch before `end` is the epoch's last, and a validation waits for it."""
        return self.val_batches is not None and end == batches and self.plan.due_at_epoch_end(self.epoch, batches)

    def train_window(self, begin: int, window: list[Dealt]) -> None:
        """Train on the batches of one optimizer step."""
        for place, dealt in enumerate(window):
            batch, batch_idx = dealt.batches[self.rank], begin + place
            self.transfer(batch)
            self.both("on_train_batch_start", batch, batch_idx)
            self.module("training_step", batch, batch_idx)
            self.log_training(dealt)
            if place == 0:
                self.both("on_before_zero_grad")
                self.module("optimizer_zero_grad", self.epoch, batch_idx)
            self.both("on_before_backward")
            self.module("backward")
            self.both("on_after_backward")
            if place == len(window) - 1:
                self.step_optimizer(batch_idx, window)
            self.callback("on_train_batch_end", batch, batch_idx)
            self.asked_to_stop = self.asked_to_stop or self.step == self.case.stop_at
            self.module("on_train_batch_end", batch, batch_idx)

    def step_optimizer(self, batch_idx: int, window: list[Dealt]) -> None:
        self.both("on_before_optimizer_step")
        self.module("configure_gradient_clipping")
        self.note("O", "step", sample_weights(window), self.rate.now)
        self.module("optimizer_step", self.epoch, batch_idx)
        self.step += 1
        self.validated = False
        self.step_scheduler("step", self.step)

    def step_scheduler(self, interval: str, count: int) -> None:
        args = self.rate.step_after(interval, count, self.metrics)
        if args is not None:
            self.module("lr_scheduler_step", *args)

    def validate(self) -> None:
        assert self.val_batches is not None
        evaluate(self, self.val_batches, sanity=False)
        self.agree_now()

    def end_epoch(self, complete: bool) -> None:
        """End an epoch. One that was cut short steps no scheduler; if a wish to stop did it, it validates once more."""
        if self.val_batches is not None and not self.validated:
            due = self.plan.due_at_epoch_end(self.epoch, self.batch) if complete else self.is_stopping()
            if due:
                self.validate()
        names = [self.logged] if self.logged is not None and self.logged.on_epoch else []
        self.show_epoch_values(names)
        self.both("on_train_epoch_end")
        if names:
            self.send_epoch_values(names)
        if complete:
            self.logged = None
            self.step_scheduler("epoch", self.epoch + 1)
            self.epochs_done += 1
            self.epoch += 1
            self.batches_before += self.batch
            self.batch = 0
            if self.stopper is not None:
                self.stopper.after_epoch(self)
            for saver in self.savers:
                saver.after_epoch(self)
        elif self.savers:
            self.savers[0].after_cut_epoch(self)
        self.settle_newest()
        self.epochs_seen += 1
        self.agree_now()
