"""Optimization: what each sample counts in an update, when an optimizer steps, and with which learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import TYPE_CHECKING

from tests.model.data import Dealt
from tests.model.trace import Refused, comparable

if TYPE_CHECKING:
    from tests.model.run import Run, Settings

RATE = 0.5
"""The learning rate that each optimizer begins with."""

Weights = dict[int, float]
"""What each sample counts in an update."""


@dataclass(frozen=True)
class Scheduler:
    """A scheduler that halves the rate each time when it steps; a plateau scheduler, when its metric is no better.

    Attributes:
        interval: "step" steps it after optimizer steps, "epoch" after epochs that came to their end.
        frequency: after how many of these.
        plateau: it is `ReduceLROnPlateau(patience=0)`.
        strict: without its metric an error ends the run; else this step is left out.
        monitor: the name of the metric that a plateau scheduler gets.
        optimizer: the number of its optimizer. One may have several schedulers: they step in their order.
        name: under which LearningRateMonitor shows its optimizer; None: by the optimizer's class.
    """

    interval: str = "epoch"
    frequency: int = 1
    plateau: bool = False
    strict: bool = True
    monitor: str = "val"
    optimizer: int = 0
    name: str | None = None


@dataclass(frozen=True)
class Manual:
    """A module with `automatic_optimization = False`.

    In each batch it makes one loss for each optimizer, divides it by `every` and calls `manual_backward`.

    Attributes:
        every: for each optimizer the batches after which it steps; it steps after the epoch's last batch too. 0: never.
        toggles: the other optimizer's weights are turned off around each backward.
        both: each loss has the weights of both optimizers: without `toggles` both get gradients of it.
        clip: `clip_gradients` is called with this largest norm before each step; None: it is not.
        schedulers: when the module steps the schedulers: "batch" after batches in which the first optimizer stepped,
            "epoch" in `on_train_epoch_end`; None: never.
    """

    every: tuple[int, ...] = (1, 1)
    toggles: bool = False
    both: bool = False
    clip: float | None = None
    schedulers: str | None = None


@dataclass(frozen=True)
class Optimization:
    """What the module does about optimization.

    Attributes:
        optimizers: 1 or 2. Each has a weight for each sample. In automatic optimization the loss is the sum of the
            batch's mean weights.
        manual: how it is done by hand; None: automatic optimization.
        returns: "loss", or "dict": the loss and the batch's number.
        skips: `training_step` returns None in each batch whose number, counted from 1, divides by this; 0: never.
        calls_closure: `optimizer_step` is overridden; it calls the closure by itself, and then steps.
        lists: `configure_optimizers` returns two lists, and schedulers without options bare. It must change nothing.
    """

    optimizers: int = 1
    manual: Manual | None = None
    returns: str = "loss"
    skips: int = 0
    calls_closure: bool = False
    lists: bool = False

    @property
    def never_steps(self) -> bool:
        return self.manual is not None and not any(self.manual.every[: self.optimizers])

    def skipped(self, batch_idx: int) -> bool:
        return bool(self.skips) and (batch_idx + 1) % self.skips == 0

    def check_skip(self, batch_idx: int, ranks: int) -> None:
        if ranks > 1 and self.skipped(batch_idx):
            raise Refused("HookError", "the other ranks would wait for this one's gradients")

    def outputs(self, batch_idx: int) -> str:
        """Return what `on_train_batch_end` gets: what `training_step` returned, a loss always within a dict."""
        if self.skipped(batch_idx):
            return "None"
        return "loss" if self.returns == "loss" else f"loss, number={batch_idx}"


# ---- what each sample counts


def sample_weights(window: list[Dealt]) -> tuple[tuple[int, float], ...]:
    """Return what each sample counts in an update in which no batch was skipped."""
    return as_seen(weights_in(window, [False] * len(window)))


def weights_in(window: list[Dealt], skipped: list[bool]) -> Weights:
    """Return what each sample counts in an update: the gradient is the mean over all samples of the window and ranks.

    So batches of one size count alike, a smaller last batch counts by its samples, and so does a shorter last window.
    A sample that several ranks have read counts for each of them. A batch that is skipped counts nothing; the others
    count what they would have counted beside it.
    """
    total = sum(len(dealt.samples) for dealt in window)
    weights: Weights = {}
    for dealt, left_out in zip(window, skipped, strict=True):
        for sample in [] if left_out else dealt.samples:
            weights[sample] = weights.get(sample, 0.0) + 1 / total
    return weights


def clipped(parts: list[Weights], limit: float | None, algorithm: str = "norm") -> list[Weights]:
    """Clip gradients: "value" limits each by itself; "norm" scales all of them down to one norm."""
    if limit is None:
        return parts
    if algorithm == "value":
        return [{sample: min(weight, limit) for sample, weight in part.items()} for part in parts]
    norm = sum(weight**2 for part in parts for weight in part.values()) ** 0.5
    scale = min(1.0, limit / (norm + 1e-6))  # as torch does it
    return [{sample: weight * scale for sample, weight in part.items()} for part in parts]


def as_seen(weights: Weights) -> tuple[tuple[int, float], ...]:
    return tuple((sample, round(weight, 5)) for sample, weight in sorted(weights.items()) if weight)


# ---- automatic optimization


def step_all(run: Run, batch_idx: int, window: list[Dealt], skipped: list[bool]) -> None:
    """Step all optimizers at the end of a window, from one gradient. It is one optimizer step.

    A window whose batches were all skipped steps too, without a gradient: nothing changes but what is counted.
    """
    s, numbers = run.case.settings, range(run.case.optimization.optimizers)
    parts = [weights_in(window, skipped) for _ in numbers]
    for _ in numbers:
        run.both("on_before_optimizer_step")
    for _ in numbers:
        run.module("configure_gradient_clipping")
    logs = any(call.hook == "configure_gradient_clipping" for call in run.case.logs)
    if logs or run.case.watch == "all":  # a module that overrides this hook clips each optimizer by itself
        parts = [clipped([part], s.gradient_clip_val, s.gradient_clip_algorithm)[0] for part in parts]
    else:
        parts = clipped(parts, s.gradient_clip_val, s.gradient_clip_algorithm)
    for number, part in enumerate(parts):
        run.note("O", "step", number, as_seen(part), run.rates.now[number])
        run.module("optimizer_step", run.epoch, batch_idx)
    run.step += 1
    run.validated = False
    run.step_schedulers("step", run.step)


# ---- manual optimization


@dataclass
class ByHand:
    """What has been accumulated by hand, for each optimizer. It begins anew with each of its steps."""

    gradients: list[Weights] = field(default_factory=lambda: [{}, {}])


def train_by_hand(run: Run, dealt: Dealt, batch_idx: int, last: bool) -> None:
    """Do what the module does in a batch. A batch in which an optimizer stepped is one step, however many stepped."""
    given = run.case.optimization.manual
    assert given is not None
    stepped = [
        bool(every) and (last or (batch_idx + 1) % every == 0)
        for every in given.every[: run.case.optimization.optimizers]
    ]
    for number, steps in enumerate(stepped):
        backward_by_hand(run, number, dealt)
        if steps:
            run.both("on_before_optimizer_step")
            algorithm = run.case.settings.gradient_clip_algorithm
            [weights] = clipped([run.by_hand.gradients[number]], given.clip, algorithm)
            run.note("O", "step", number, as_seen(weights), run.rates.now[number])
            run.by_hand.gradients[number] = {}
    if stepped[0] and given.schedulers == "batch":
        run.rates.halve_all()
    run.step += any(stepped)
    run.validated = False


def backward_by_hand(run: Run, number: int, dealt: Dealt) -> None:
    """Call `manual_backward` with an optimizer's loss, times `batch_weight`: samples of all ranks count the same."""
    given, optimizers = run.case.optimization.manual, run.case.optimization.optimizers
    assert given is not None
    run.both("on_before_backward")
    run.module("backward")
    run.both("on_after_backward")
    reached = range(optimizers) if given.both and not given.toggles else [number]
    for each in reached:
        gradient = run.by_hand.gradients[each]
        for sample in dealt.samples:
            gradient[sample] = gradient.get(sample, 0.0) + 1 / len(dealt.samples) / max(1, given.every[number])


def check_manual(settings: Settings) -> None:
    """Refuse the Trainer's arguments for what the module does by hand."""
    if settings.accumulate_grad_batches != 1 or settings.gradient_clip_val is not None:
        raise Refused("UsageError", "accumulation and clipping are done by hand", early=True)


# ---- schedulers


class Rates:
    """The optimizers' learning rates."""

    def __init__(self, schedulers: tuple[Scheduler, ...], optimizers: int) -> None:
        self.schedulers = schedulers
        self.now = [RATE] * optimizers
        self.best: dict[int, float] = {}

    def halve(self, scheduler: Scheduler) -> None:
        self.now[scheduler.optimizer] /= 2

    def halve_all(self) -> None:
        """Step all schedulers, as a module does by hand."""
        for scheduler in self.schedulers:
            self.halve(scheduler)

    def due(self, interval: str, count: int) -> list[int]:
        """Return the numbers of the schedulers that step.

        Args:
            interval: what has just ended, "step" or "epoch".
            count: how many of them have ended in the whole run.
        """
        return [
            number
            for number, one in enumerate(self.schedulers)
            if one.interval == interval and count % one.frequency == 0
        ]

    def step(self, number: int, metrics: Mapping[str, float]) -> tuple[float | str | None] | None:
        """Step a scheduler.

        Returns:
            The argument of `lr_scheduler_step`: the metric, or None for a scheduler without one. Nothing where the
            scheduler is not stepped.
        """
        scheduler = self.schedulers[number]
        if not scheduler.plateau:
            self.halve(scheduler)
            return (None,)
        metric = metrics.get(scheduler.monitor)
        if metric is None:
            if scheduler.strict:
                raise Refused("SettingError", "the plateau scheduler's metric was not logged")
            return None
        if not isnan(metric) and (number not in self.best or metric < self.best[number]):
            self.best[number] = metric
        else:
            self.halve(scheduler)
        return (comparable(metric),)

    def monitored(self, interval: str | None, now: str) -> dict[str, float]:
        """Return what a LearningRateMonitor logs.

        Args:
            interval: the monitor's; None: each rate as the interval of its optimizer's first scheduler says.
            now: "step" before a batch, "epoch" at an epoch's start.
        """
        seen = dict[int, tuple[str, str]]()
        for one in self.schedulers:
            seen.setdefault(one.optimizer, (one.name or "lr-RecordingSGD", one.interval))
        for number in range(len(self.now)):
            seen.setdefault(number, ("lr-RecordingSGD", "step"))
        shown, names = dict[str, float](), list[str]()
        for number, (name, own) in seen.items():
            if (interval or own) == now:
                shown[f"{name}-{names.count(name)}" if name in names else name] = self.now[number]
            names.append(name)
        return shown


def monitor_rates(run: Run, now: str) -> None:
    """Log the learning rates as a LearningRateMonitor does: its row has no epoch."""
    given = run.case.rate_monitor
    values = {} if given is None else run.rates.monitored(None if given == "each" else given, now)
    if values:
        run.shown.callback.update(values)
        run.send_row(values, run.step)


def monitor_rates_by_step(run: Run) -> None:
    """Log the rates before the first batch of an optimizer step, every `log_every_n_steps` steps."""
    every = run.case.settings.log_every_n_steps
    if run.case.rate_monitor != "epoch" and every and run.step % every == 0 and run.step != run.monitored_at:
        run.monitored_at = run.step
        monitor_rates(run, "step")
