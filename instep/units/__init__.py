"""Tokens and samples as units for the end of a run, validations, saves and learning rates.

`Tokens` and `Samples` are callbacks that count over all ranks, each batch once. `by_tokens` and `by_samples` make a
schedule of `instep.schedules` depend on these counts instead of steps. Each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.units.counting import Samples as Samples
    from instep.units.counting import Tokens as Tokens
    from instep.units.schedule import CountedSchedule as CountedSchedule
    from instep.units.schedule import by_samples as by_samples
    from instep.units.schedule import by_tokens as by_tokens

__all__, __getattr__, __dir__ = loads(__name__)
