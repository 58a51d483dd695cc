"""Learning-rate schedules that depend on the tokens or samples of all ranks, instead of optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.errors import SettingError
from instep.schedules import Schedule
from instep.units.counting import Samples, Tokens, UnitCount
from instep.utils.checks import wrong

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer


class CountedSchedule(Schedule):
    """Schedule that depends on a count of tokens or samples; `by_tokens` and `by_samples` make it.

    Args:
        schedule: schedule whose curve is used, with the count in place of the step.
        counter: the callback that counts.
    """

    def __init__(self, schedule: Schedule, counter: UnitCount) -> None:
        if not isinstance(schedule, Schedule):
            raise wrong("schedule", schedule, "a schedule of instep.schedules, such as cosine(optimizer, total_tokens)")
        self._counter = counter
        super().__init__(schedule.optimizer, schedule._curve)

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next step from the count up to and including this step. Collective."""
        self.last_epoch = self._counter.settle() - 1
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, which has numbers and strings only."""
        state = super().state_dict()
        del state["_counter"]  # the counter is a callback, and checkpoints save callbacks separately
        return state


def by_tokens(schedule: Schedule, trainer: Trainer) -> CountedSchedule:
    """Make a schedule count tokens instead of steps: its `total_steps` and `warmup_steps` are then tokens.

    The rate of a step depends on the tokens of all ranks before that step. So it does not depend on the number of
    ranks, the length of sequences, or the step at which a run was resumed.

    Args:
        schedule: a schedule of `instep.schedules`, with numbers of tokens in place of steps.
        trainer: Trainer with a `Tokens` among its callbacks.

    Returns:
        The new schedule, to return from `configure_optimizers`. The given schedule is not used any more.

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
    """Make a schedule count samples instead of steps, with the Trainer's `Samples`. Otherwise this is like `by_tokens`.

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
