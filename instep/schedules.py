"""Learning-rate schedules with warm-up, as torch's `LambdaLR`: linear, cosine, wsd, inverse_sqrt, one_cycle, constant.

A schedule gives the rate of each optimizer step as a fraction of the optimizer's own rate, which may differ between
parameter groups. Steps are counted from 0. A Trainer steps a schedule once per optimizer step, whatever the
accumulation and the number of processes are; `self.trainer.estimated_stepping_batches` is the number of optimizer steps
of the Trainer's run.

The rate depends only on the step and on the schedule's arguments. A checkpoint has the arguments as numbers and
strings, but a resumed run uses the arguments that its program gives now, and warns if they differ from those in the
checkpoint.

Example:
    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> schedule = make("linear", optimizer, total_steps=6, warmup_steps=2)
    >>> [round(schedule.rate_at(step), 2) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from instep.errors import SettingError, one_of
from instep.utils.checks import above_zero, at_least, choice, is_int, is_number, wrong
from instep.utils.optimizers import put_rates
from instep.utils.warn import warn_user

__all__ = ["SCHEDULES", "Schedule", "constant", "cosine", "inverse_sqrt", "linear", "make", "one_cycle", "wsd"]

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: 0.5 * (1.0 + math.cos(math.pi * part)),
    "sqrt": lambda part: 1.0 - math.sqrt(part),
}


# ---- curves, as callable objects whose attributes are numbers and strings


class _Curve:
    """Curve of the rate, as a fraction of the optimizer's rate: it rises from `start_ratio` to 1 in the warm-up.

    The method `after` computes the rate after the warm-up.
    """

    def __init__(self, warmup_steps: int, start_ratio: float) -> None:
        self.warmup_steps = warmup_steps
        self.start_ratio = _part("start_ratio", start_ratio)

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.start_ratio + (1.0 - self.start_ratio) * step / self.warmup_steps
        return self.after(step)

    def after(self, step: int) -> float:
        return 1.0


class _Decay(_Curve):
    """Curve that falls to `min_ratio` in the last `decay_steps` of `total_steps`, and stays there."""

    def __init__(
        self, total_steps: int, warmup_steps: int, start_ratio: float, decay_steps: int, min_ratio: float, decay: str
    ) -> None:
        super().__init__(warmup_steps, start_ratio)
        self.total_steps = total_steps
        self.decay_steps = decay_steps
        self.min_ratio = _part("min_ratio", min_ratio)
        self.decay = decay

    def after(self, step: int) -> float:
        done = step - (self.total_steps - self.decay_steps)
        part = min(1.0, max(0.0, done / max(1, self.decay_steps)))
        return self.min_ratio + (1.0 - self.min_ratio) * _DECAYS[self.decay](part)


class _InverseSqrt(_Curve):
    def __init__(self, warmup_steps: int, start_ratio: float, timescale: int, min_ratio: float) -> None:
        super().__init__(warmup_steps, start_ratio)
        self.timescale = timescale
        self.min_ratio = _part("min_ratio", min_ratio)

    def after(self, step: int) -> float:
        return max(self.min_ratio, math.sqrt(self.timescale / (step - self.warmup_steps + self.timescale)))


class _OneCycle:
    def __init__(self, total_steps: int, warmup_steps: float, div: float, final_div: float, anneal: str) -> None:
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        self.div_factor = div
        self.final_div_factor = final_div
        self.anneal = anneal

    def __call__(self, step: int) -> float:
        first, last, peak = 1.0 / self.div_factor, self.total_steps - 1, self.warmup_steps - 1.0
        if step <= peak:
            begin, end, part = first, 1.0, step / peak if peak else 1.0
        else:
            begin, end, part = 1.0, first / self.final_div_factor, (step - peak) / max(last - peak, 1e-12)
        return end + (begin - end) * _DECAYS[self.anneal](min(1.0, part))


class Schedule(LambdaLR):
    """Learning-rate schedule that counts optimizer steps. The functions of this module return schedules of this class.

    The Trainer steps a schedule once per optimizer step, unless the dict that `configure_optimizers` returns has
    another interval. Use the class directly for a curve of your own.

    Args:
        optimizer: optimizer whose learning rates, as they are now, are multiplied by the curve.
        curve: function that takes the number of steps done and returns a factor. If it is an object of a class of
            yours, its attributes must be JSON values, since checkpoints store them.

    Raises:
        SettingError: `optimizer` is not an optimizer.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> schedule = Schedule(optimizer, lambda step: 0.5 ** (step // 10))  # half the rate every 10 steps
        >>> [schedule.rate_at(step) for step in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
    """

    interval: ClassVar[str] = "step"

    def __init__(self, optimizer: Optimizer, curve: Callable[[int], float]) -> None:
        if not isinstance(optimizer, Optimizer):
            raise wrong("optimizer", optimizer, "a torch.optim.Optimizer")
        self._curve = curve
        super().__init__(optimizer, curve)

    def rate_at(self, step: int) -> float:
        """Return the rate at step `step`, counted from 0, as a fraction of the optimizer's own rate."""
        return self._curve(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, as numbers and strings."""
        state = super().state_dict()
        del state["_curve"]  # the entry "lr_lambdas" already has the curve's attributes
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step with this schedule's own arguments; warn if the saved arguments differ."""
        own = dict(vars(self._curve))
        super().load_state_dict(state_dict)
        saved = dict(vars(self._curve))
        vars(self._curve).clear()
        vars(self._curve).update(own)
        changed = [f"{key}={own[key]!r} (there {saved.get(key)!r})" for key in own if own[key] != saved.get(key)]
        if changed:
            warn_user(
                f"this run's schedule has other arguments than the checkpoint's: {', '.join(changed)}. It goes on at "
                f"step {self.last_epoch} of this run's own."
            )
            part = self._curve(self.last_epoch)
            self._last_lr = [base * part for base in self.base_lrs]
            put_rates(self.optimizer, [{"lr": rate} for rate in self._last_lr])


# ---- schedules


def constant(optimizer: Optimizer, *, warmup_steps: int = 0, start_ratio: float = 0.0) -> Schedule:
    """Make a schedule that stays at the optimizer's rate after a linear warm-up.

    Args:
        optimizer: optimizer, whose own rates are the highest rates of the schedule.
        warmup_steps: number of optimizer steps of the warm-up; step `warmup_steps` is the first with the full rate.
        start_ratio: rate of step 0, as a fraction of the highest rate.

    Returns:
        The schedule.

    Raises:
        SettingError: an argument is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> [constant(optimizer, warmup_steps=4).rate_at(step) for step in (0, 2, 4, 100)]
        [0.0, 0.5, 1.0, 1.0]
    """
    return Schedule(optimizer, _Curve(_whole("constant", warmup_steps), start_ratio))


def linear(
    optimizer: Optimizer,
    total_steps: int | None = None,
    *,
    warmup_steps: int | float = 0,
    start_ratio: float = 0.0,
    min_ratio: float = 0.0,
) -> Schedule:
    """Make a schedule with a linear warm-up and a linear decay.

    Args:
        optimizer: optimizer, whose own rates are the highest rates of the schedule.
        total_steps: number of optimizer steps of the run: pass `self.trainer.estimated_stepping_batches`. `instep fit`
            passes it to a schedule that is named in a configuration.
        warmup_steps: number of optimizer steps of the warm-up; a float below 1 is a fraction of `total_steps`.
        start_ratio: rate of step 0, as a fraction of the highest rate.
        min_ratio: rate at the end of the run and after it, as a fraction of the highest rate.

    Returns:
        The schedule.

    Raises:
        SettingError: an argument is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = linear(optimizer, 100, warmup_steps=10)
        >>> [round(schedule.rate_at(step), 2) for step in (0, 5, 10, 55, 100)]
        [0.0, 0.5, 1.0, 0.5, 0.0]

    Source: `get_linear_schedule_with_warmup` of transformers, which has the same values.
    """
    total, warmup = _lengths("linear", total_steps, warmup_steps)
    return Schedule(optimizer, _Decay(total, warmup, start_ratio, total - warmup, min_ratio, "linear"))


def cosine(
    optimizer: Optimizer,
    total_steps: int | None = None,
    *,
    warmup_steps: int | float = 0,
    start_ratio: float = 0.0,
    min_ratio: float = 0.0,
) -> Schedule:
    """Make a schedule with a linear warm-up and a decay along half a cosine. The arguments are those of `linear`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = cosine(optimizer, 100, warmup_steps=0.1, min_ratio=0.1)
        >>> [round(schedule.rate_at(step), 3) for step in (0, 5, 10, 55, 100, 200)]
        [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]

    Source: Loshchilov and Hutter, SGDR, arXiv:1608.03983, without restarts. `get_cosine_schedule_with_warmup` of
    transformers has the same values.
    """
    total, warmup = _lengths("cosine", total_steps, warmup_steps)
    return Schedule(optimizer, _Decay(total, warmup, start_ratio, total - warmup, min_ratio, "cosine"))


def wsd(
    optimizer: Optimizer,
    total_steps: int | None = None,
    *,
    warmup_steps: int | float = 0,
    decay_steps: int | float = 0.2,
    decay: Literal["linear", "cosine", "sqrt"] = "linear",
    start_ratio: float = 0.0,
    min_ratio: float = 0.0,
) -> Schedule:
    """Make a schedule of warm-up, stable rate and decay; before the decay begins, a run can still be made longer.

    Args:
        optimizer: optimizer, whose own rates are the highest rates of the schedule.
        total_steps: as in `linear`.
        warmup_steps: as in `linear`.
        decay_steps: number of optimizer steps of the decay at the end; a float below 1 is a fraction of `total_steps`.
        decay: shape of the decay: "linear", "cosine", or "sqrt" (1 minus the root of the fraction that is done).
        start_ratio: as in `linear`.
        min_ratio: as in `linear`.

    Returns:
        The schedule.

    Raises:
        SettingError: an argument is out of range, or warm-up and decay are longer than the run.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = wsd(optimizer, 100, warmup_steps=10, decay_steps=20)
        >>> [round(schedule.rate_at(step), 2) for step in (0, 5, 10, 80, 90, 100)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]

    Source: Hu et al., MiniCPM, arXiv:2404.06395; "sqrt" is of Hägele et al., arXiv:2405.18392.
    """
    total, warmup = _lengths("wsd", total_steps, warmup_steps)
    falling = _steps("decay_steps", decay_steps, total)
    if warmup + falling > total:
        raise SettingError(
            f"decay_steps={decay_steps} and warmup_steps={warmup_steps} are {warmup + falling} steps, more than "
            f"total_steps={total}. Make one of them shorter.",
            field="decay_steps",
            got=decay_steps,
        )
    choice(*_DECAYS)("decay", decay)
    return Schedule(optimizer, _Decay(total, warmup, start_ratio, falling, min_ratio, decay))


def inverse_sqrt(
    optimizer: Optimizer,
    *,
    warmup_steps: int = 0,
    timescale: int | None = None,
    start_ratio: float = 0.0,
    min_ratio: float = 0.0,
) -> Schedule:
    """Make a schedule that, after a linear warm-up, falls with the inverse root of the step; it needs no run length.

    Args:
        optimizer: optimizer, whose own rates are the highest rates of the schedule.
        warmup_steps: number of optimizer steps of the warm-up.
        timescale: number of steps after the warm-up in which the rate falls to 1 / sqrt(2) of the highest rate. None:
            `warmup_steps`, or 10,000 without warm-up.
        start_ratio: rate of step 0, as a fraction of the highest rate.
        min_ratio: lowest rate after the warm-up, as a fraction of the highest rate.

    Returns:
        The schedule.

    Raises:
        SettingError: an argument is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = inverse_sqrt(optimizer, warmup_steps=100)
        >>> [round(schedule.rate_at(step), 3) for step in (0, 50, 100, 200, 400)]
        [0.0, 0.5, 1.0, 0.707, 0.5]

    Source: Vaswani et al., arXiv:1706.03762; `get_inverse_sqrt_schedule` of transformers has the same values.
    """
    warmup = _whole("inverse_sqrt", warmup_steps)
    scale = (warmup or 10_000) if timescale is None else at_least(1)("timescale", timescale)
    return Schedule(optimizer, _InverseSqrt(warmup, start_ratio, scale, min_ratio))


def one_cycle(
    optimizer: Optimizer,
    total_steps: int | None = None,
    *,
    warmup_steps: int | float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    anneal: Literal["cosine", "linear"] = "cosine",
) -> Schedule:
    """Make a schedule of one cycle: the rate rises to the optimizer's own rate, and falls to almost 0.

    Args:
        optimizer: optimizer, whose own rates are the highest rates of the schedule (torch's `max_lr`). Momenta are not
            changed.
        total_steps: number of optimizer steps of the run, as in `linear`; the last step has the lowest rate.
        warmup_steps: number of optimizer steps of the rise, the last of which has the highest rate; a float below 1 is
            a fraction of `total_steps`.
        div_factor: the rate of step 0 is the highest rate divided by this number.
        final_div_factor: the rate of the last step is the rate of step 0 divided by this number.
        anneal: shape of rise and fall, "cosine" or "linear".

    Returns:
        The schedule.

    Raises:
        SettingError: an argument is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = one_cycle(optimizer, 100, div_factor=10.0)
        >>> [round(schedule.rate_at(step), 2) for step in (0, 29, 64, 99)]
        [0.1, 1.0, 0.5, 0.0]

    Source: Smith and Topin, arXiv:1708.07120. torch's `OneCycleLR` has the same rates.
    """
    total, _ = _lengths("one_cycle", total_steps, warmup_steps)
    peak = warmup_steps * total if isinstance(warmup_steps, float) and warmup_steps < 1 else float(warmup_steps)
    for name, value in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
        above_zero("above 0")(name, value)
    choice("cosine", "linear")("anneal", anneal)
    return Schedule(optimizer, _OneCycle(total, max(1.0, peak), float(div_factor), float(final_div_factor), anneal))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    make_one.__name__: make_one for make_one in (constant, linear, cosine, wsd, inverse_sqrt, one_cycle)
}
"""Functions that make a schedule, by the name that `make` takes."""


def make(name: str, optimizer: Optimizer, **arguments: Any) -> Schedule:
    """Make a schedule by its name, such as a name in a configuration.

    Args:
        name: name of the schedule: "constant", "linear", "cosine", "wsd", "inverse_sqrt" or "one_cycle".
        optimizer: optimizer, whose own rates are the highest rates of the schedule.
        arguments: arguments of the function with this name; `total_steps` is left out if the function does not take it.

    Returns:
        The schedule.

    Raises:
        SettingError: there is no schedule with this name, or an argument is unknown or out of range.

    Example:
        >>> import torch
        >>> from instep import TrainModule
        >>> class Model(TrainModule):
        ...     def configure_optimizers(self):
        ...         optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        ...         steps = self.trainer.estimated_stepping_batches
        ...         schedule = make(self.hparams.schedule, optimizer, total_steps=steps, warmup_steps=100)
        ...         return {"optimizer": optimizer, "lr_scheduler": schedule}
    """
    if name not in SCHEDULES:
        raise one_of("name", name, SCHEDULES)
    function = SCHEDULES[name]
    takes = list(inspect.signature(function).parameters)[1:]
    if "total_steps" not in takes:
        arguments.pop("total_steps", None)
    unknown = [argument for argument in arguments if argument not in takes]
    if unknown:
        raise SettingError(
            f"the schedule {name!r} has no argument {unknown[0]!r}; it takes {', '.join(takes)}.", field=unknown[0]
        )
    return function(optimizer, **arguments)


# ---- checks of arguments


def _part(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 1:
        raise wrong(name, value, "a part of the optimizer's rate, from 0 to 1")
    return float(value)


def _steps(name: str, value: Any, total: int) -> int:
    """Check a number of steps and return it as an integer; a float below 1 is a fraction of `total`."""
    if isinstance(value, float) and 0 <= value < 1:
        return round(value * total)
    if is_number(value) and float(value).is_integer() and 0 <= value <= total:
        return int(value)
    raise wrong(name, value, f"optimizer steps from 0 to total_steps={total}, or a part of them as a float below 1")


def _whole(schedule: str, warmup_steps: Any) -> int:
    """Check and return the number of warm-up steps of a schedule that does not know the length of the run."""
    if isinstance(warmup_steps, float) and 0 < warmup_steps < 1:
        expected = f"an integer: a part of a run needs total_steps, and {schedule!r} has none. linear and cosine have"
        raise wrong("warmup_steps", warmup_steps, expected)
    return at_least(0)("warmup_steps", warmup_steps)


def _lengths(schedule: str, total_steps: Any, warmup_steps: Any) -> tuple[int, int]:
    """Check the length of the run and the length of the warm-up, and return both in steps."""
    if not is_int(total_steps, 1):
        raise wrong(
            "total_steps",
            total_steps,
            f"the optimizer steps of the run, which {schedule!r} needs: self.trainer.estimated_stepping_batches, which "
            "is infinite without max_epochs or max_steps",
        )
    return int(total_steps), _steps("warmup_steps", warmup_steps, int(total_steps))
