"""Loaders of a run: who gives them, when they are asked for again, and what is read of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.model.data import Combined, Data, Dealt, Draw, expected_batches, lend_anew, limit_in_batches
from tests.model.evaluation import Plan, validates_in
from tests.model.trace import Refused

if TYPE_CHECKING:
    from tests.model.run import Run


class Reader:
    """What a run reads of a loader, epoch after epoch.

    Args:
        data: the loader.
        limit: the setting that leaves out the rest of an epoch.
        setting: its name.
        ranks: how many there are.
        uneven: as in `Data.deal`.
        draw: of the order.
        goes_on: data that counts in itself goes on from one epoch to the next. Of a validation it is brought back.
    """

    def __init__(
        self,
        data: Data | Combined,
        limit: int | float,
        setting: str,
        ranks: int,
        uneven: str,
        draw: Draw,
        goes_on: bool,
    ) -> None:
        self.data, self.ranks, self.uneven, self.draw = data, ranks, uneven, draw
        self.length = data.length(ranks, uneven)
        self.limit = limit_in_batches(limit, self.length, setting)
        self.once = any(one.kind == "generator" for one in data.loaders)
        self.again = goes_on and any(one.kind == "again" for one in data.loaders)
        self.given = 0  # batches, in all validations

    def deal(self, epoch: int) -> list[Dealt]:
        return self.data.read(lambda *of: self.draw(*of, epoch), self.ranks, self.uneven)

    def read(self, epoch: int, done: int = 0) -> list[Dealt]:
        """Return the batches of an epoch.

        Args:
            epoch: which.
            done: batches that were read before, which data that goes on does not give again.

        Raises:
            Refused: a generator was read to its end in an earlier epoch.
        """
        dealt = self.deal(epoch)
        if not (self.once or self.again):
            return dealt[: self.limit]
        if self.once and done and done == len(dealt):
            raise Refused("DataError", "a generator gives its values once")
        return dealt[done % max(1, len(dealt)) :][: self.limit]

    def rest(self, epoch: int, done: int, batch: int, samples: int) -> list[Dealt]:
        """Return the batches of an epoch of which so many, with so many samples, are done; by other ranks perhaps."""
        data = self.data
        if isinstance(data, Combined) or not data.is_divided:
            return self.read(epoch, done) if self.once or self.again else lend_anew(self.read(epoch, done), batch)
        order = self.draw(data, 0, 0, epoch)
        end = len(order) if self.limit is None or data.kind != "map" else self.limit * data.batch_size * self.ranks
        return [*[Dealt((), ())] * batch, *data.deal(order[samples:end], self.ranks, self.uneven)][: self.limit]

    def after(self, done: int, batches: int) -> int:
        """Return how many batches of data that goes on were read, after so many more."""
        return done + batches if self.once or self.again else 0


class Loaders:
    """The loaders of a run.

    Args:
        run: the run.

    Attributes:
        trains: whether there is something to train.
        validates: whether there are validations.
        train: the training data.
        plan: when the epoch validates.
        val: the validation's loaders; None: they were not asked for yet.
    """

    def __init__(self, run: Run) -> None:
        case, s = run.case, run.case.settings
        self.run, self.case, self.settings = run, case, s
        # overfit_batches stands in place of both limits.
        self.train_limit = s.overfit_batches or s.limit_train_batches
        self.val_limit = s.overfit_batches or s.limit_val_batches
        self.trains = self.train_limit != 0
        self.validates = case.val is not None and self.val_limit != 0
        # Loaders that fit was given stay: only those of hooks are asked for again.
        self.every = s.reload_dataloaders_every_n_epochs if case.source == "hooks" else 0
        self.val: list[Reader] | None = None
        self.make_train(0)
        if self.validates and self.trains:
            self.make_plan()
        if self.validates and not self.every:
            self.make_val(0)

    def draw(self, data: Data, number: int, cycle: int, epoch: int) -> list[int]:
        """Return a loader's samples in their order. With overfit_batches it is that of the data."""
        shuffles = data.shuffle and not self.settings.overfit_batches
        return self.run.order(data, number, cycle, epoch) if shuffles else data.in_sequence()

    def make_train(self, epoch: int) -> None:
        """Prepare the training data that the module's hook makes in an epoch; without a hook it is always the same."""
        data, ranks = self.case.train.as_of(epoch), self.case.ranks
        if isinstance(data, Combined) and data.given == "combined" and data.mode == "sequential":
            raise Refused("SettingError", "one loader after the other is for evaluation", early=True)
        uneven = self.settings.uneven
        self.train = Reader(data, self.train_limit, "limit_train_batches", ranks, uneven, self.draw, goes_on=True)
        if self.train.length == 0 and self.trains:
            raise Refused("DataError", "the training data says that it has no batch", early=True)

    def make_plan(self) -> None:
        self.plan = Plan(self.settings, expected_batches(self.train.length, self.train.limit))

    def make_val(self, epoch: int) -> None:
        """Prepare the validation's loaders: one of all of them together, or several with a limit for each."""
        assert self.case.val is not None
        data = self.case.val.as_of(epoch)
        one_by_one = isinstance(data, Combined) and (data.given != "combined" or data.mode == "sequential")
        # An evaluation leaves no sample out: a rank that has no more waits for the others.
        self.val = [
            Reader(one, self.val_limit, "limit_val_batches", self.case.ranks, "join", self.draw, goes_on=False)
            for one in (data.loaders if one_by_one else (data,))
        ]

    def ask(self, stage: str) -> None:
        if self.case.source == "hooks":
            self.run.module(f"{stage}_dataloader")

    def load(self) -> None:
        """Ask for the loaders before the training. With reloading, a validation asks for its own.

        A resumed run gets what the run got that was broken off.
        """
        self.ask("train")
        if self.every:
            later(lambda: self.make_train(self.run.last_epoch - self.run.last_epoch % self.every))
        if self.validates and not self.every:
            self.ask("val")

    def begin_epoch(self) -> None:
        """Ask for the training data again, every so many epochs."""
        epoch = self.run.epoch
        if self.every and epoch and epoch % self.every == 0 and not self.run.batch:
            self.run.read = 0
            self.ask("train")
            later(lambda: self.make_train(epoch))
        if self.validates and self.validates_in(epoch):
            later(self.make_plan)

    def validates_in(self, epoch: int) -> bool:
        return validates_in(self.settings.check_val_every_n_epoch, epoch)

    def validation(self) -> list[Reader]:
        """Return the validation's loaders.

        With reloading they are asked for in the first epoch that validates, and in each that validates and is so many
        epochs after the last that did. A sanity check before the first one asks for its own.
        """
        run, epoch = self.run, self.run.last_epoch
        due = self.validates_in(epoch) and (run.val_loaded is None or epoch - run.val_loaded >= self.every)
        if self.every and (self.val is None or due):
            run.val_loaded = epoch if due else run.val_loaded
            self.ask("val")
            later(lambda: self.make_val(epoch if run.val_loaded is None else run.val_loaded))
        assert self.val is not None
        return self.val


def later(make: Callable[[], None]) -> None:
    """Prepare a loader within the training: what does not fit is refused there, and not early."""
    try:
        make()
    except Refused as refused:
        raise Refused(refused.kind, str(refused)) from None
