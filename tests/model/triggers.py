"""Triggers: what a hook asks a run for, when all ranks know of it, and what they do then.

A trigger is set on one rank, at any time. All ranks act on it at one place: behind an optimizer step, never within one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.model.trace import Refused

if TYPE_CHECKING:
    from tests.model.resume import Start
    from tests.model.run import Run

TRIGGERS = ("stop", "save", "validate", "preempted")
"""Names of triggers, set by `trainer.should_stop = True`, `trainer.set_trigger(name)`, or SIGTERM to the process."""


@dataclass
class Triggers:
    """The triggers of a fit, with `Trainer(trigger_every=1)`.

    Attributes:
        asked: what was set on some rank, and was not agreed on.
        sent: what of it was set when the last boundary was passed: the ranks agree on it at the next one.
        boundary: the optimizer step at which the next one is.
        places: places at which the ranks have agreed so far.
        stops: all ranks know of a wish to stop.
        deferred: what was agreed on within the evaluation that runs: it is done behind its end.
    """

    asked: list[str] = field(default_factory=list)
    sent: tuple[str, ...] = ()
    boundary: int = 0
    places: int = 0
    stops: bool = False
    deferred: tuple[str, ...] = ()

    def set(self, name: str) -> None:
        """Set a trigger on this rank."""
        if name not in self.asked:
            self.asked.append(name)

    def set_at(self, event: int, start: Start) -> None:
        """Set what this rank is told to set at an event, and record when, which is all that counts for the others."""
        if event == start.sets_at and start.trigger is not None:
            start.sets_before = self.places
            self.set(start.trigger)

    def meet(self, start: Start) -> None:
        """Come to a place at which the ranks agree; another rank may have set something before it."""
        if start.sets_at is None and start.trigger is not None and self.places == start.sets_before:
            self.set(start.trigger)
        self.places += 1

    def agree_at_boundary(self, start: Start) -> tuple[str, ...]:
        """Agree on what was set when the last boundary was passed: the message takes until this one."""
        self.meet(start)
        agreed = tuple(name for name in self.sent if name in self.asked)
        self.asked = [name for name in self.asked if name not in agreed]
        self.sent = tuple(self.asked)
        return agreed

    def enter_or_leave_evaluation(self) -> None:
        """Enter or leave an evaluation, whose batches are boundaries of their own."""
        self.sent, self.boundary = (), 0

    def agree_now(self, start: Start) -> tuple[str, ...]:
        """Agree on all that is set, and wait for it."""
        self.meet(start)
        agreed, self.asked, self.sent, self.deferred = (*self.deferred, *self.asked), [], (), ()
        return agreed


def agree_at_window_end(run: Run) -> None:
    """Agree and act behind an optimizer step. A batch in which no optimizer stepped by hand is no boundary."""
    if run.step >= run.triggers.boundary:
        run.triggers.boundary = run.step + 1
        act_on(run, run.triggers.agree_at_boundary(run.start))


def agree_at_batch_end(run: Run) -> bool:
    """Agree behind a batch of an evaluation; return whether its other batches are left out.

    They are for a signal alone, and a run that goes on from there begins the validation again. All else waits for the
    evaluation's end.
    """
    triggers = run.triggers
    triggers.deferred += triggers.agree_at_boundary(run.start)
    return "preempted" in triggers.deferred


def agree_now(run: Run) -> None:
    """Agree and act: before the first step, and behind an evaluation and an epoch."""
    agreed = run.triggers.agree_now(run.start)
    run.is_stopping()  # a verdict of early stopping that waits for no minimum is agreed on too: no later one undoes it
    act_on(run, agreed)


def act_on(run: Run, agreed: tuple[str, ...]) -> None:
    """Do what the ranks agreed on.

    - "stop" ends the fit, as soon as `min_steps` and `min_epochs` allow it, with the hooks of its end. An epoch that it
      cuts short is closed: it validates, calls its last hook, and is saved.
    - "save" saves the newest state, whatever the policy of the first ModelCheckpoint says, unless it is there.
    - "validate" validates, where there are validations, and changes no plan.
    - "preempted" saves as "save" does, and ends the run by an error. Before its first step there is nothing to save.

    A run that goes on from such a save does next what it would have done without the trigger.
    """
    for name in sorted(agreed, key=lambda name: name == "validate"):
        if name == "stop":
            run.triggers.stops = True
        elif name == "validate":
            if run.loaders.validates:
                run.validate()
        elif name == "save" or run.step or run.resumes:
            for saver in run.savers[:1]:
                saver.save_now(run)
            run.settle_newest()
        if name == "preempted":
            raise Refused("Preempted", "a signal has ended the run")
