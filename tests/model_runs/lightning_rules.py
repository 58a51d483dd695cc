"""Rules of PyTorch Lightning 2.6 that differ from the model's. Each has a name, and can be turned on alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any

from tests.model.checkpoints import Disk, Saved, Saver, delete, name_of
from tests.model.data import Dealt, Order, expected_batches
from tests.model.evaluation import evaluate
from tests.model.logs import Book, Shown, send_epoch_values
from tests.model.optimization import as_seen, clipped
from tests.model.resume import Start, find_checkpoint
from tests.model.run import Case, Run
from tests.model.stopping import Stopper, at_epoch_ends
from tests.model.trace import Event, Refused, comparable
from tests.model.triggers import agree_at_window_end, agree_now

RULES = {
    "row steps": "a row of step n is logged at n - 1",
    "window in a mean of means": "each batch of a window counts the same, also a smaller one",
    "short window": "the last window of an epoch is divided by accumulate_grad_batches, also if it is shorter",
    "validation within a window": "a validation does not wait for the window's end",
    "stop at once": "should_stop ends the epoch after this batch, also within a window",
    "epoch schedules": "a schedule by epochs steps before on_train_batch_end of the last batch",
    "plateau by steps": "a plateau scheduler by steps steps after the validation",
    "frequency of steps": "a schedule by steps counts the batches of its epoch",
    "shorter than its length": "where data ends before its length, the epoch has no last batch",
    "longer than its length": "data that goes on after its length is left out",
    "empty epoch": "an epoch without a batch is no error",
    "nothing to train": "where no step is due, on_train_start and on_train_end do not run",
    "loader by loader": "of several validation loaders the values of each show at its end",
    "sanity of the last loader": "in a sanity check of several loaders the values of the last one never show",
    "empty validation": "a validation without a batch has no hooks",
    "teardown": "teardown does not run after an exception",
    "saves in a cut epoch": "an epoch that is cut short saves as one that has ended",
    "saves without the metric": "without the metric nothing is saved, and before the first validation without an error",
    "last": "save_last saves only where top k saves, and at the end only where nothing was saved",
    "last_model_path": "there is one only with save_last",
    "a verdict stays": "once EarlyStopping has asked to stop, the run stops at its minimum, also if better by then",
    "threshold": "EarlyStopping has reached its stopping_threshold only where the metric is better",
    "callbacks first": "EarlyStopping and ModelCheckpoint act before the module's on_validation_end",
    "one name": "without monitor, a checkpoint replaces the one before if it has the same name",
    "nan": "a checkpoint with the metric nan is ranked as the worst",
    "worst of equals": "of equally bad checkpoints the oldest goes",
    "best without monitor": "it is the newest that save_top_k has saved, not that save_last or the end has",
    "no validation to wait for": "callbacks that act at validations by default wait for one also where none runs",
    "1 is 1.0": "val_check_interval=1 saves at epoch ends, as 1.0 does",
    "saves by steps": "a save that waits for a validation",
    "row at a stop": "a batch that ends an epoch by should_stop logs a row, whatever log_every_n_steps is",
    "values again": "a row has the last value of each name of the epoch, also one that an earlier row had",
    "min_steps": "min_steps alone implies min_epochs=1",
    "plateau before the row": "a plateau scheduler by epochs steps before the row of the epoch's values",
}


REFUSED = {
    "val_check_interval without a validation": "must be less than or equal to the number of the training batches",
    "a fraction of one of several loaders": "Please increase the `limit_",
    "val_check_interval as a fraction without a length": "When using an IterableDataset for `train_dataloader`",
}
"""What Lightning refuses that instep takes, with a part of the error's text."""

MOST_EPOCHS = 30
"""More of them than any case has: the run never ends."""


def run(case: Case, rules: frozenset[str], order: Order | None = None) -> tuple[list[Event], Refused | None]:
    """Return what is seen of a fit under some of Lightning's rules, and the error that ends it."""
    it = LightningRun(
        case, lambda data, *of: data.in_sequence() if order is None else order(of[-1]), Start(), rules=rules
    )
    refused = None
    try:
        it.fit()
    except Refused as error:
        refused = error
        it.callback("on_exception")
        if "teardown" not in rules:
            it.both("teardown", "fit")
        it.note("-", "error")
    return without_metrics_after_an_error([event for event in it.events if event.owner not in "SVF"]), refused


def without_metrics_after_an_error(events: list[Event]) -> list[Event]:
    """Leave the metrics out from `on_exception` on."""
    ends = next((number for number, event in enumerate(events) if event.name == "on_exception"), len(events))
    ends = min(ends, len(events) - 1 if events and events[-1].name == "error" else ends)
    return [*events[:ends], *(event._replace(metrics=()) for event in events[ends:])]


@dataclass
class Listed:
    """A loader whose batches are known; with a run the values of the loaders before it show at its beginning."""

    batches: list[Dealt]
    run: Any = None
    given: int = 0

    def read(self, epoch: int, done: int = 0) -> list[Dealt]:
        if self.run is not None:
            self.run.shown.epoch_values(self.run.evaluation, self.run.rank)
        return self.batches

    def after(self, done: int, batches: int) -> int:
        return 0


def listed(run: LightningRun) -> Any:
    """Return the validation's loaders for `evaluate`."""
    batches, shows = run.val_batches or [], "loader by loader" in run.rules
    return [Listed(one, run if shows and any(batches[:number]) else None) for number, one in enumerate(batches)]


@dataclass
class ShownBut(Shown):
    """What shows, without the values of one loader."""

    suffix: str | None = None

    def epoch_values(self, book: Book, rank: int) -> None:
        super().epoch_values(book, rank)
        for values in (self.callback, self.bar) if self.suffix else ():
            for name in [name for name in values if name.endswith(self.suffix or "")]:
                del values[name]


@dataclass
class LightningRun(Run):
    """A fit under some of Lightning's rules."""

    rules: frozenset[str] = frozenset()
    stepped: int = 0  # optimizer steps whose batch is over

    has_empty_validation: bool = False
    plan: Any = None
    limit: int | None = None
    val_batches: list[list[Dealt]] | None = None  # of each loader
    window_has_ended: bool = True

    def resolve(self) -> None:
        super().resolve()
        loaders = self.loaders
        self.limit, self.plan = loaders.train.limit, loaders.plan if loaders.validates and loaders.trains else None
        if loaders.val is None:
            return
        self.val_batches = [one.read(0) for one in loaders.val]
        expected = [expected_batches(one.length, one.limit) for one in loaders.val]
        self.has_empty_validation = set(expected) == {0} and "empty validation" in self.rules
        if "longer than its length" in self.rules:
            self.val_batches = [one[:end] for one, end in zip(self.val_batches, expected, strict=True)]

    @property
    def asked_to_stop(self) -> bool:
        return self.triggers.stops or "stop" in self.triggers.asked

    def sanity_check(self) -> None:
        steps = self.case.settings.num_sanity_val_steps
        if self.val_batches is None or steps == 0:
            return
        self.callback("on_sanity_check_start")
        if not self.has_empty_validation:
            last = f"/dataloader_idx_{len(self.val_batches) - 1}" if len(self.val_batches) > 1 else None
            self.shown = shown = ShownBut(suffix=last if "sanity of the last loader" in self.rules else None)
            evaluate(self, listed(self), sanity=True)
            shown.suffix = None
        self.callback("on_sanity_check_end")
        self.shown.forget()

    # ---- logs

    def send(self, values: dict[str, float], step: int) -> None:
        super().send(values, self.stepped if "row steps" in self.rules else step)

    def send_step_values(self) -> None:
        every = self.case.settings.log_every_n_steps
        asked = self.asked_to_stop or (self.stopper is not None and self.stopper.stops)
        if every and (self.step % every == 0 or ("row at a stop" in self.rules and asked)):
            row = self.book.step_row(self)
            if "values again" in self.rules:
                logged = [name for name in self.book.names.values() if name.on_step and name.logger and name.values]
                row = {name.step_name: self.metrics[name.step_name] for name in logged}
            self.send(row, self.step)

    # ---- the whole

    def fit(self) -> None:
        self.resolve()
        self.module("configure_callbacks")
        find_checkpoint(self)
        if self.stopper is not None:
            self.stopper = LightningStopper(self.stopper.given, rules=self.rules)
        savers: Any = [LightningSaver(saver.given, rules=self.rules) for saver in self.savers]
        self.savers = savers
        self.module("prepare_data")
        self.both("setup", "fit")
        self.module("configure_model")
        self.module("configure_optimizers")
        self.both("on_fit_start")
        self.sanity_check()
        trains = "nothing to train" not in self.rules or not self.is_finished()
        if trains:
            self.both("on_train_start")
        while not self.is_finished():
            self.train_epoch()
        if trains:
            self.both("on_train_end")
            for saver in self.savers:
                saver.after_training(self)
        self.both("on_fit_end")
        self.both("teardown", "fit")

    def validates_after(self, begin: int, end: int, window_ends: bool) -> bool:
        """Return whether a validation runs after the batch before `end`."""
        if self.val_batches is None:
            return False
        if "validation within a window" in self.rules:
            return self.plan.due_after_window(self.epoch, self.batches_before, end - 1, end)
        return window_ends and self.plan.due_after_window(self.epoch, self.batches_before, begin, end)

    def train_epoch(self) -> None:
        s, train = self.case.settings, self.loaders.train
        size = s.accumulate_grad_batches
        try:
            batches = train.deal(self.epoch)[: self.limit]
        except Refused:  # of several loaders one has no batch
            if "empty epoch" not in self.rules:
                raise
            batches = []
        expected = expected_batches(train.length, self.limit)
        if expected is not None and "longer than its length" in self.rules:
            batches = batches[:expected]
        self.both("on_train_epoch_start")
        if self.epoch > MOST_EPOCHS:
            raise Refused("Endless", "no epoch has a batch")
        if not batches and "empty epoch" not in self.rules:
            raise Refused("DataError", "the epoch had no batch")
        complete, end, begin = bool(batches), 0, 0
        for batch_idx, dealt in enumerate(batches):
            end = batch_idx + 1
            is_last = end == len(batches)
            if expected is not None and "shorter than its length" in self.rules:
                is_last = end >= expected
            if batch_idx % size == 0:
                begin = batch_idx
            window_ends = end % size == 0 or is_last
            due = self.validates_after(begin, end, window_ends)
            self.train_batch(batch_idx, dealt, batches[begin:end] if window_ends else None, is_last)
            self.batch, self.samples = end, self.samples + len(dealt.samples)
            savers: list[Any] = self.savers
            for saver in savers:
                waits = due or self.is_due_at_epoch_end(end, len(batches))
                saver.after_batch(self, waits, window_ends, is_last)
            if window_ends:
                self.send_step_values()
            stops = self.stops_now()
            if stops and "stop at once" in self.rules and self.val_batches is not None:
                due = due or self.plan.in_epoch(self.epoch)
            complete = is_last
            if due or (is_last and "stop at once" in self.rules and self.is_due_at_epoch_end(end, len(batches))):
                self.validate(window_ends)
            if window_ends:
                if "plateau by steps" in self.rules:
                    self.step_some("step", self.count_of_steps(batch_idx), plateau=True)
                self.stepped = self.step
                agree_at_window_end(self)
            if window_ends and (self.step == s.max_steps or ("stop at once" not in self.rules and self.is_stopping())):
                complete = is_last
                break
            if "stop at once" in self.rules and self.stops_now():
                break
        self.end_epoch(complete)

    def stops_now(self) -> bool:
        s = self.case.settings
        least = s.min_epochs or 0
        if "min_steps" in self.rules and s.min_epochs is None and s.min_steps is not None:
            least = 1
        wished = self.asked_to_stop or (self.stopper is not None and self.stopper.stops)
        return wished and self.step >= (s.min_steps or 0) and self.epochs_done >= least

    def is_stopping(self) -> bool:
        return self.stops_now() if "stop at once" in self.rules else super().is_stopping()

    def count_of_steps(self, batch_idx: int) -> int:
        return batch_idx + 1 if "frequency of steps" in self.rules else self.step

    def train_batch(self, batch_idx: int, dealt: Dealt, window: list[Dealt] | None, is_last: bool) -> None:
        (batch,) = dealt.batches
        self.transfer(batch)
        self.dealt, self.batch_idx = dealt, batch_idx
        self.both("on_train_batch_start", batch, batch_idx)
        self.module("training_step", batch, batch_idx)
        self.backward(batch_idx % self.case.settings.accumulate_grad_batches == 0, batch_idx, skipped=False)
        if window is not None:
            self.step_optimizer(batch_idx, window)
        if is_last and "epoch schedules" in self.rules:
            self.step_some("epoch", self.epoch + 1, plateau=False)
        self.callback("on_train_batch_end", "loss", batch, batch_idx)
        if self.step == self.case.stop_at:
            self.triggers.set("stop")
        self.module("on_train_batch_end", "loss", batch, batch_idx)

    def weights(self, window: list[Dealt]) -> dict[int, float]:
        size = self.case.settings.accumulate_grad_batches
        samples = sum(len(dealt.samples) for dealt in window)
        weights: dict[int, float] = {}
        for dealt in window:
            for sample in dealt.samples:
                weight = 1 / samples
                if "window in a mean of means" in self.rules:
                    weight = 1 / len(dealt.samples) / len(window)
                if "short window" in self.rules:
                    weight *= len(window) / size
                weights[sample] = weights.get(sample, 0.0) + weight
        return weights

    def step_optimizer(self, batch_idx: int, window: list[Dealt]) -> None:
        s = self.case.settings
        self.both("on_before_optimizer_step")
        self.module("configure_gradient_clipping")
        (weights,) = clipped([self.weights(window)], s.gradient_clip_val, s.gradient_clip_algorithm)
        self.note("O", "step", 0, as_seen(weights), self.rates.now[0])
        self.module("optimizer_step", self.epoch, batch_idx)
        self.step += 1
        self.validated = False
        count = self.count_of_steps(batch_idx)
        self.step_some("step", count, plateau=None if "plateau by steps" not in self.rules else False)

    def step_some(self, interval: str, count: int, plateau: bool | None) -> None:
        """Step the schedulers that are due: all, or only those that are plateau schedulers, or are not."""
        for number in self.rates.due(interval, count):
            if plateau is None or self.rates.schedulers[number].plateau == plateau:
                args = self.rates.step(number, self.metrics)
                if args is not None:
                    self.module("lr_scheduler_step", *args)

    def module(self, hook: str, *args: Any) -> None:
        if hook != "on_validation_model_zero_grad" or self.window_has_ended:
            super().module(hook, *args)

    def validate(self, window_ends: bool = True) -> None:
        assert self.val_batches is not None
        self.window_has_ended = window_ends
        if self.has_empty_validation:
            self.module("on_validation_model_zero_grad")
        else:
            try:
                evaluate(self, listed(self), sanity=False)
            except Refused:
                last = [event for event in self.events if event.owner != "S"][-1]
                if "callbacks first" in self.rules and last[:2] == ("M", "on_validation_end"):
                    self.events.remove(last)
                raise
            self.validated = True
        agree_now(self)

    def end_epoch(self, complete: bool) -> None:
        if self.val_batches is not None and not self.validated and "stop at once" not in self.rules:
            due = self.plan.due_at_epoch_end(self.epoch, self.batch) if complete else self.is_stopping()
            if due:
                self.validate()
        self.shown.epoch_values(self.book, self.rank)
        self.both("on_train_epoch_end")
        self.shown.epoch_values(self.book, self.rank)
        late = True if "epoch schedules" in self.rules else None
        if complete and "plateau before the row" in self.rules:
            self.step_some("epoch", self.epoch + 1, plateau=late)
        self.stepped -= 1
        send_epoch_values(self, self.book)
        self.stepped += 1
        self.book.begin_epoch()
        if complete and "plateau before the row" not in self.rules:
            self.step_some("epoch", self.epoch + 1, plateau=late)
        cut = not complete
        if not cut or "saves in a cut epoch" in self.rules or "stop at once" in self.rules:
            self.epochs_done += 1
        self.epoch += 1
        self.batches_before += self.batch
        self.batch = self.samples = 0
        if self.stopper is not None and (not cut or "saves in a cut epoch" in self.rules):
            self.stopper.after_epoch(self)
        for saver in self.savers:
            if not cut or "saves in a cut epoch" in self.rules:
                saver.after_epoch(self)
        if cut and self.savers and "saves in a cut epoch" not in self.rules:
            self.savers[0].after_cut_epoch(self)
        self.epochs_seen += 1
        agree_now(self)


@dataclass
class LightningSaver(Saver):
    """Saves and deletes under some of Lightning's rules."""

    rules: frozenset[str] = frozenset()
    top: Saved | None = None  # what save_top_k has saved last
    step: int = 0  # the one that was last saved; nothing is saved before the first one

    def seen(self, disk: Disk) -> tuple[Any, ...]:
        """Return the steps of the checkpoints that are there, of the best one with its score, and of the last one."""
        there = {one.step for one in disk.saved if one.folder == self.given.folder}
        score = None if self.best is None or self.best.score is None else comparable(self.best.score)
        last = None if "last_model_path" in self.rules and not self.given.save_last else self.last
        return (tuple(sorted(there)), self.best and self.best.step, score, last and last.step)

    # ---- when

    def after_batch(self, run: LightningRun, validates_now: bool, window_ends: bool, is_last: bool) -> None:
        if "saves by steps" not in self.rules:
            if window_ends:
                self.after_window(run, validates_now)
            return
        every, monitor = self.given.every_n_train_steps, self.given.monitor
        if every is None or run.step % every:
            return
        validates = run.val_batches is not None and not run.has_empty_validation and run.plan.in_epoch(run.epoch)
        fresh = is_last and validates and not self.acts_at_epoch_ends(run)
        if monitor is not None and (monitor not in run.metrics or fresh):
            self.waits = True
        elif run.step != self.step:
            self.save(run)

    def after_validation(self, run: Run) -> None:
        ends = self.acts_at_epoch_ends(run)
        if "saves by steps" in self.rules and (ends or run.step == self.step):
            return
        if self.waits:
            self.waits = False
            self.save(run)
        if not ends:
            self.save_by_epoch(run)

    def after_epoch(self, run: Run) -> None:
        if self.acts_at_epoch_ends(run):
            self.save_by_epoch(run)

    def after_training(self, run: Run) -> None:
        if "last" not in self.rules:
            super().after_training(run)
        elif not self.step:
            self.saved_at = -1
            super().after_training(run)

    def save_by_epoch(self, run: Run) -> None:
        if "saves by steps" in self.rules and run.step != self.step:
            self.judged_at = -1
        super().save_by_epoch(run)

    def acts_at_epoch_ends(self, run: Run) -> bool:
        return acts_at_epoch_ends(run, self.given.save_on_train_epoch_end, self.rules)

    # ---- what

    def save(self, run: Run, end: bool = False, full: bool = False) -> None:
        given, by_steps = self.given, self.given.every_n_train_steps is not None
        if end:
            super().save(run, end, full)
            return
        score = None if given.monitor is None else run.metrics.get(given.monitor)
        if given.monitor is not None and score is None:
            if "saves without the metric" not in self.rules:
                super().save(run, end, full)
            elif run.validations and given.save_top_k != 0:
                raise Refused("SettingError", "the monitored metric was not logged in the validation")
            return
        if run.step == self.step and "saves by steps" in self.rules:
            return
        lost = score is not None and isnan(score)
        if lost:
            score = None if "nan" not in self.rules else inf if given.mode == "min" else -inf
        judged = given.monitor is not None
        base = f"{run.step}" if given.filename is None else name_of(given, run)
        new = Saved(given.folder, base, 0, run.step, run.line, given.key, given.metric, score, judged, run.state())
        self.saved_at = self.judged_at = run.step
        is_top = new in self.to_keep([*self.kept, new])
        wanted = is_top or (bool(given.save_last) and ("last" not in self.rules or by_steps))
        if lost and "nan" not in self.rules:
            wanted = wanted or (not given.saves_nothing and given.save_last is not False)
        before, self.top = self.top, new if is_top else self.top
        if wanted:
            self.add(run, new)
        if "one name" in self.rules and is_top and before is not None and before.base == base and not judged:
            delete(run, [one for one in self.kept if one.step == before.step], self)

    def add(self, run: Run, new: Saved, again: Sequence[Saved] = ()) -> None:
        self.step = new.step
        super().add(run, new, again)

    def find_best(self) -> None:
        if self.given.monitor is None and "best without monitor" in self.rules:
            self.best = self.top if self.given.save_top_k else None
        else:
            super().find_best()

    def to_keep(self, candidates: list[Saved]) -> list[Saved]:
        k = self.given.save_top_k
        if "worst of equals" not in self.rules or self.given.monitor is None or k < 1:
            return super().to_keep(candidates)
        sign = 1 if self.given.mode == "min" else -1
        ranked = [one for one in candidates if one.score is not None]
        while len(ranked) > k:
            *old, new = ranked
            worst = max(old, key=lambda one: sign * (one.score or 0.0))
            is_better = sign * (new.score or 0.0) < sign * (worst.score or 0.0)
            ranked.remove(worst if is_better else new)
        return ranked


@dataclass
class LightningStopper(Stopper):
    """Stops under some of Lightning's rules."""

    rules: frozenset[str] = frozenset()

    def after_validation(self, run: Run) -> None:
        if not self.acts_at_epoch_ends(run):
            self.check(run)

    def after_epoch(self, run: Run) -> None:
        if self.acts_at_epoch_ends(run):
            self.check(run)

    def acts_at_epoch_ends(self, run: Run) -> bool:
        asked, s = self.given.check_on_train_epoch_end, run.case.settings
        if asked is None and "no validation to wait for" in self.rules:
            asked = False if s.val_check_interval != 1 or s.check_val_every_n_epoch != 1 else None
        return acts_at_epoch_ends(run, asked, self.rules)

    def judge(self, value: float) -> bool:
        given = self.given
        if "threshold" in self.rules and value == given.stopping_threshold:
            self.given = replace(given, stopping_threshold=None)
        try:
            return super().judge(value)
        finally:
            self.given = given

    def check(self, run: Run) -> None:
        stopped = self.stops
        super().check(run)
        self.stops = self.stops or (stopped and "a verdict stays" in self.rules)


def acts_at_epoch_ends(run: Run, asked: bool | None, rules: frozenset[str]) -> bool:
    """Return whether a callback acts at the end of epochs, else of validations."""
    s = run.case.settings
    if asked is None and "no validation to wait for" in rules and s.check_val_every_n_epoch != 1:
        return False
    if asked is None and "1 is 1.0" in rules and s.check_val_every_n_epoch == 1 and s.val_check_interval == 1:
        return True
    return at_epoch_ends(run, asked)
