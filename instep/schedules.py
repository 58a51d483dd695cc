"""Learning-rate schedules with warm-up, as torch's `LambdaLR`: linear, cosine, wsd, inverse_sqrt, one_cycle, constant.

A schedule gives the rate of each optimizer step as a part of the optimizer's own rate, which may differ between its
parameter groups. Steps are counted from 0. A Trainer steps these schedules once per optimizer step, whatever the
accumulation and the number of processes, and `self.trainer.estimated_stepping_batches` is the length of its run.

A checkpoint keeps only numbers and words of a schedule. The rate is a function of the step. So a resumed run uses the
arguments that its program gives now, and warns if they differ from the checkpoint's.

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


# ---- curves: callables whose attributes are numbers and strings


class _Curve:
    """Rate of a step as a fraction of the optimizer's: rises from `start_ratio` in warm-up, then follows `after`."""

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
    """Curve that falls to `min_ratio` over the last `decay_steps` of `total_steps`, and stays there."""

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
    """Learning-rate schedule that is counted in optimizer steps. The functions of this module return one.

    The Trainer steps a schedule once per optimizer step, unless the dict in `configure_optimizers` says another
    interval. Make one yourself for a curve that no function here has.

    Args:
        optimizer: the learning rates of its groups at this moment are multiplied by the curve.
        curve: function of the number of steps done that returns a factor. Where it is an object, its attributes are
            JSON values.

    Raises:
        SettingError: `optimizer` is no optimizer.

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
        """Return the fraction of the optimizer's own rate at step `step`, counted from 0."""
        return self._curve(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and words."""
        state = super().state_dict()
        del state["_curve"]  # "lr_lambdas" holds the same values
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step, with this schedule's own arguments; warn if they differ from the saved ones."""
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
        optimizer: its groups' rates are the highest ones.
        warmup_steps: optimizer steps until the rate is reached: step `warmup_steps` is the first to use all of it.
        start_ratio: part of the rate that step 0 uses.

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
        optimizer: its groups' rates are the highest ones.
        total_steps: optimizer steps of the run: `self.trainer.estimated_stepping_batches`. `instep fit` gives it.
        warmup_steps: optimizer steps until the rate is reached; a float below 1 is a part of `total_steps`.
        start_ratio: part of the rate that step 0 uses.
        min_ratio: part of the rate at the end, and after it.

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
    """Make a schedule with a linear warm-up and half a cosine down. Arguments are those of `linear`.

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
    """Make a schedule of warm-up, stable rate and decay; a run can be made longer at any step before the decay.

    Args:
        optimizer: its groups' rates are the highest ones.
        total_steps: as in `linear`, like `warmup_steps`, `start_ratio` and `min_ratio`.
        warmup_steps: as there.
        decay_steps: optimizer steps of the decay at the end; a float below 1 is a part of `total_steps`.
        decay: "linear", "cosine", or "sqrt": one minus the root of the part of the decay that is done.
        start_ratio: as there.
        min_ratio: as there.

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
    """Make a schedule that falls with the inverse root of the steps after a linear warm-up; needs no run length.

    Args:
        optimizer: its groups' rates are the highest ones.
        warmup_steps: optimizer steps until the rate is reached.
        timescale: steps after warm-up over which the rate falls to 1 / sqrt(2); by default `warmup_steps`, or 10,000.
        start_ratio: part of the rate that step 0 uses.
        min_ratio: the rate never falls below this part.

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
    """Make a schedule of one cycle: up to the optimizer's rate and down to almost nothing.

    Args:
        optimizer: its groups' rates are the highest ones: torch's `max_lr`. Momenta stay as they are.
        total_steps: as in `linear`; the last one has the lowest rate.
        warmup_steps: optimizer steps of the way up, of which the last has the highest rate; a float below 1 is a part
            of `total_steps`.
        div_factor: the rate begins at the highest one divided by this.
        final_div_factor: it ends at the first one divided by this.
        anneal: "cosine" or "linear".

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
    """Make a schedule by the name that a configuration gives.

    Args:
        name: "constant", "linear", "cosine", "wsd", "inverse_sqrt" or "one_cycle".
        optimizer: its groups' rates are the highest ones.
        arguments: those of the function of that name. A `total_steps` that it does not take is left out.

    Returns:
        The schedule.

    Raises:
        SettingError: the name is none, or an argument is unknown or out of range.

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


# ---- checks


def _part(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value <= 1:
        raise wrong(name, value, "a part of the optimizer's rate, from 0 to 1")
    return float(value)


def _steps(name: str, value: Any, total: int) -> int:
    """Return a number of steps; a float below 1 is a fraction of `total`."""
    if isinstance(value, float) and 0 <= value < 1:
        return round(value * total)
    if is_number(value) and float(value).is_integer() and 0 <= value <= total:
        return int(value)
    raise wrong(name, value, f"optimizer steps from 0 to total_steps={total}, or a part of them as a float below 1")


def _whole(schedule: str, warmup_steps: Any) -> int:
    """Check the length of a warm-up if the length of the run is not known."""
    if isinstance(warmup_steps, float) and 0 < warmup_steps < 1:
        expected = f"an integer: a part of a run needs total_steps, and {schedule!r} has none. linear and cosine have"
        raise wrong("warmup_steps", warmup_steps, expected)
    return at_least(0)("warmup_steps", warmup_steps)


def _lengths(schedule: str, total_steps: Any, warmup_steps: Any) -> tuple[int, int]:
    """Check the lengths of a run and of its warm-up, and return both in steps."""
    if not is_int(total_steps, 1):
        raise wrong(
            "total_steps",
            total_steps,
            f"the optimizer steps of the run, which {schedule!r} needs: self.trainer.estimated_stepping_batches, which "
            "is infinite without max_epochs or max_steps",
        )
    return int(total_steps), _steps("warmup_steps", warmup_steps, int(total_steps))
