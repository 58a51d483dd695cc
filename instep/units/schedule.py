"""Learning rates that follow the tokens or samples of all ranks, in place of optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.errors import SettingError
from instep.schedules import Schedule
from instep.units.counting import Samples, Tokens, UnitCount
from instep.utils.checks import wrong

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer


class CountedSchedule(Schedule):
    """Schedule whose curve depends on a count; made by `by_tokens` and `by_samples`.

    Args:
        schedule: its curve, of which the argument is the count.
        counter: the callback that counts.
    """

    def __init__(self, schedule: Schedule, counter: UnitCount) -> None:
        if not isinstance(schedule, Schedule):
            raise wrong("schedule", schedule, "a schedule of instep.schedules, such as cosine(optimizer, total_tokens)")
        self._counter = counter
        super().__init__(schedule.optimizer, schedule._curve)

    def step(self, epoch: int | None = None) -> None:
        """Set the rates from the count, which includes the current step. Collective."""
        self.last_epoch = self._counter.settle() - 1
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and words."""
        state = super().state_dict()
        del state["_counter"]  # the schedule keeps its own counter, which is not saved
        return state


def by_tokens(schedule: Schedule, trainer: Trainer) -> CountedSchedule:
    """Make a schedule count tokens instead of steps: its `total_steps` and `warmup_steps` are then tokens.

    The rate of a step depends on the tokens of all ranks before that step. So it does not depend on the number of
    ranks, the length of sequences, or the step at which a run was resumed.

    Args:
        schedule: one of `instep.schedules`, with numbers of tokens.
        trainer: with a `Tokens` among its callbacks.

    Returns:
        The schedule, for `configure_optimizers`; the given one is not used any more.

    Raises:
        SettingError: the Trainer has no `Tokens`, or more than one.

    Example:
        >>> import torch
        >>> from instep import TrainModule
        >>> from instep.schedules import cosine
        >>> class Model(TrainModule):
        ...     def configure_optimizers(self):
        ...         optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        ...         schedule = cosine(optimizer, 2_000_000_000, warmup_steps=100_000_000)
        ...         return [optimizer], [by_tokens(schedule, self.trainer)]
    """
    return CountedSchedule(schedule, _counter(Tokens, trainer))


def by_samples(schedule: Schedule, trainer: Trainer) -> CountedSchedule:
    """Make a schedule count samples instead of steps, by the Trainer's `Samples`; otherwise like `by_tokens`.

    Example:
        >>> import torch
        >>> from instep import Trainer
        >>> from instep.schedules import linear
        >>> from instep.units import Samples
        >>> trainer = Trainer(callbacks=[Samples()], logger=False, enable_checkpointing=False)
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> by_samples(linear(optimizer, 1_000, warmup_steps=100), trainer).rate_at(50)
        0.5
    """
    return CountedSchedule(schedule, _counter(Samples, trainer))


def _counter(kind: type[UnitCount], trainer: Trainer) -> UnitCount:
    found = [callback for callback in trainer.callbacks if isinstance(callback, kind)]
    if len(found) != 1:
        raise SettingError(
            f"a schedule by {kind.unit} needs one {kind.__name__} among the Trainer's callbacks, and there are "
            f"{len(found)}: Trainer(callbacks=[instep.units.{kind.__name__}(...)]).",
            field="callbacks",
        )
    return found[0]
