"""Validation within a fit: when it is due, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.model.logs import Book, Name, send_epoch_values
from tests.model.trace import Refused
from tests.model.triggers import agree_at_batch_end

if TYPE_CHECKING:
    from tests.model.loaders import Reader
    from tests.model.run import Run, Settings


def validates_in(check_val_every_n_epoch: int | None, epoch: int) -> bool:
    """Return whether an epoch validates: every one whose number, counted from 1, divides by the setting."""
    return check_val_every_n_epoch is None or (epoch + 1) % check_val_every_n_epoch == 0


class Plan:
    """When validations run.

    Args:
        settings: the Trainer's.
        expected: training batches that an epoch should have; None where that is not known.

    Attributes:
        every: training batches from one validation to the next; None: validate once, at the epoch's end.
    """

    def __init__(self, settings: Settings, expected: int | None) -> None:
        interval, self.epochs = settings.val_check_interval, settings.check_val_every_n_epoch
        self.expected = expected
        self.every: int | None = None
        if isinstance(interval, int):
            self.every = interval
            if self.epochs is not None and expected is not None and interval > expected:
                raise Refused("SettingError", "val_check_interval is longer than an epoch", early=True)
        elif interval != 1.0:
            if expected is None:
                raise Refused("SettingError", "val_check_interval is a fraction of an unknown length", early=True)
            self.every = max(1, int(expected * interval))

    def in_epoch(self, epoch: int) -> bool:
        return validates_in(self.epochs, epoch)

    def due_after_window(self, epoch: int, before: int, begin: int, end: int) -> bool:
        """Return whether a validation runs after an accumulation window.

        One is due after every `every` batches. If the window has not ended there, the validation waits for its end.

        Args:
            epoch: the window's epoch.
            before: batches of earlier epochs, which count only with `check_val_every_n_epoch=None`.
            begin: batches of the epoch before the window.
            end: batches of the epoch after the window.
        """
        if self.every is None or not self.in_epoch(epoch):
            return False
        if self.epochs is not None:
            before = 0
        return (before + end) // self.every > (before + begin) // self.every

    def due_at_epoch_end(self, epoch: int, batches: int) -> bool:
        """Return whether a validation waits for the end of an epoch that had so many batches.

        By default it does. It does too where the data ends before a batch that a validation was planned after.
        """
        if not self.in_epoch(epoch):
            return False
        if self.every is None:
            return True
        if self.epochs is None or self.expected is None:
            return False
        return batches // self.every < self.expected // self.every


def evaluate(run: Run, loaders: Sequence[Reader], sanity: bool) -> bool:
    """Run one validation, or the sanity check, whose values are forgotten at its end.

    Of several loaders the hooks of batches get the number, and the names that they log end with it.

    Returns:
        Whether it came to its end. Else it was left behind a batch, since a signal came.
    """
    run.evaluation = book = Book()
    run.triggers.enter_or_leave_evaluation()
    val = book.names["", "val"] = Name("val", on_step=False, on_epoch=True)
    if not sanity:
        run.module("on_validation_model_zero_grad")
    run.module("on_validation_model_eval")
    run.both("on_validation_start")
    run.both("on_validation_epoch_start")
    most, batches = run.case.settings.num_sanity_val_steps if sanity else -1, 0
    for number, loader in enumerate(loaders):
        place = (number,) if len(loaders) > 1 else ()
        book.suffix = f"/dataloader_idx_{number}" if place else ""
        read = loader.read(run.last_epoch, loader.given)[: None if most == -1 else most]
        loader.given, batches = loader.after(loader.given, len(read)), batches + len(read)
        for batch_idx, dealt in enumerate(read):
            batch = dealt.batches[run.rank]
            run.transfer(batch, number)
            run.dealt, run.batch_idx = dealt, batch_idx
            run.both("on_validation_batch_start", batch, batch_idx, *place)
            if number == 0:
                val.add_all(run.case.values[run.validations % len(run.case.values)], dealt)
            run.module("validation_step", batch, batch_idx, *place)
            run.both("on_validation_batch_end", batch, batch_idx, *place)
            send_step_values_of(run, book, batch_idx, sanity)
            if agree_at_batch_end(run):
                run.evaluation = None
                return False
    run.triggers.enter_or_leave_evaluation()
    book.suffix = ""
    if not val.values:
        del book.names["", "val"]
    run.shown.epoch_values(book, run.rank)
    run.both("on_validation_epoch_end")
    run.shown.epoch_values(book, run.rank)
    if not sanity:
        send_epoch_values(run, book)
        run.validations += bool(batches)
    run.both("on_validation_end")
    run.evaluation = None
    if not sanity:
        run.validated = True
        if run.stopper is not None:
            run.stopper.after_validation(run)
        for saver in run.savers:
            saver.after_validation(run)
        run.settle_newest()
    run.module("on_validation_model_train")
    return True


def check_sanity(run: Run) -> None:
    """Run a few validation batches before the training; -1 runs all. What they log is forgotten.

    Data that gives its values once is left alone: the first validation would lack them.
    """
    if not run.loaders.validates or run.case.settings.num_sanity_val_steps == 0:
        return
    run.callback("on_sanity_check_start")
    loaders = run.loaders.validation()
    if any(loader.once for loader in loaders) or evaluate(run, loaders, sanity=True):
        run.callback("on_sanity_check_end")
    run.shown.forget()


def send_step_values_of(run: Run, book: Book, batch_idx: int, sanity: bool) -> None:
    """Send a validation's step values every `log_every_n_steps` of its batches. Such rows have a count of their own."""
    every = run.case.settings.log_every_n_steps
    if every and (batch_idx + 1) % every == 0:
        row = book.step_row(run)
        if not sanity:
            run.evaluated_rows += 1
            run.send(row, run.evaluated_rows)
