"""A learning rate found by trying many rates, one step each; the steps are undone afterwards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import torch

from instep.callbacks.base import Callback, print_text
from instep.errors import HookError, SettingError, UsageError
from instep.utils.checks import FLAG, above_zero, at_least, choice, is_number, wrong
from instep.utils.imports import require
from instep.utils.optimizers import set_learning_rates
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

log = logging.getLogger(__name__)

_MODES = ("linear", "exponential")
_NAMES = ("lr", "learning_rate")
_BETA = 0.98  # decay of the running mean of losses
_SKIP_BEGIN, _SKIP_END = 10, 1  # points that a suggestion leaves out
_FEWEST = _SKIP_BEGIN + 2 + _SKIP_END  # fewest points of a search: a slope needs two that are not left out


class LRFinder:
    """The losses at a range of learning rates, and the rate that these suggest.

    Args:
        mode: "exponential" or "linear": how the rate grew from step to step.
        lr_min: the first rate.
        lr_max: the last rate.
        num_training: steps from the one to the other.

    Attributes:
        results: "lr", the rates, and "loss", the smoothed loss at each.

    Example:
        >>> finder = LRFinder("linear", 0.0, 4.0, 4)
        >>> finder.results = {"lr": [0.0, 1.0, 2.0, 3.0, 4.0], "loss": [5.0, 4.9, 3.0, 2.95, 9.0]}
        >>> finder.suggestion(skip_begin=0)
        1.0
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode = choice(*_MODES)("mode", mode)
        self.lr_min, self.lr_max, self.num_training = lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._optimal_idx: int | None = None

    def suggestion(self, skip_begin: int = _SKIP_BEGIN, skip_end: int = _SKIP_END) -> float | None:
        """Suggest the rate at which the loss falls most steeply; losses that are not finite are left out.

        Args:
            skip_begin: points left out at the beginning, where the mean has little behind it.
            skip_end: points left out at the end, where the loss may have begun to grow.

        Returns:
            The rate; None, with an error in the log that says why, where fewer than two points are left.
        """
        stop = len(self.results["loss"]) - skip_end
        points = [
            (index, float(rate), float(loss))
            for index, (rate, loss) in enumerate(zip(self.results["lr"], self.results["loss"], strict=True))
            if skip_begin <= index < stop and math.isfinite(loss)
        ]
        self._optimal_idx = None
        if len(points) < 2:
            log.error(
                "Failed to compute suggestion for learning rate because there are not enough points: of %d losses %d "
                "are left without the first %d, the last %d and those that are not finite, and 2 are needed. Take more "
                "steps (num_training), skip less, or raise early_stop_threshold.",
                len(self.results["loss"]), len(points), skip_begin, skip_end,
            )  # fmt: skip
            return None
        rates = torch.tensor([rate for _, rate, _ in points], dtype=torch.float64)
        losses = torch.tensor([loss for _, _, loss in points], dtype=torch.float64)
        (slopes,) = torch.gradient(losses, spacing=[rates])
        best = self._optimal_idx = points[int(slopes.argmin())][0]
        return self.results["lr"][best]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the loss over the learning rate, with matplotlib.

        Args:
            suggest: mark the suggestion with a red point.
            show: open a window.
            ax: the matplotlib Axes to draw on; by default those of a new figure.

        Returns:
            The figure.

        Raises:
            MissingPackageError: there is no matplotlib.
        """
        plt = require("matplotlib.pyplot", extra="plots", purpose="LRFinder.plot")
        if ax is None:
            _, ax = plt.subplots()
        rates, losses = self.results["lr"], self.results["loss"]
        ax.plot(rates, losses)
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest and self.suggestion() is not None and self._optimal_idx is not None:
            at = self._optimal_idx
            ax.plot(rates[at], losses[at], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return ax.figure


class LearningRateFinder(Callback):
    """Find a learning rate before training, by steps with growing rates that are undone afterwards.

    The loss at each step is the mean over its micro-batches and all ranks, smoothed by a running mean. The suggestion
    is written into the module's learning rate, and into the optimizer, whose schedules go on as if they had begun with
    it. All other effects of the steps are undone. A resumed run keeps the rate and does not search again.

    To search at other epochs too, call `lr_find(trainer, module)` in `on_train_epoch_start` of a subclass.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        num_training_steps: optimizer steps from the one to the other; a suggestion needs 13 or more.
        mode: "exponential": each rate is the last one times a factor. "linear": plus a number.
        early_stop_threshold: end once the smoothed loss is this many times the best one, or not finite; None tries all.
        update_attr: write the suggestion into the module.
        attr_name: the attribute of the module, its hyperparameters or the datamodule that has the rate; by default `lr`
            or `learning_rate`, whichever there is.
        weights_only: as in Lightning, whose trial writes a checkpoint; nothing is written here.

    Attributes:
        optimal_lr: the result, an `LRFinder`; None before it has run.

    Raises:
        SettingError: an argument is wrong. At the start: another callback of this kind looks for the rate too.
        HookError: (in the run) there is not one optimizer.
        UsageError: (in the run) manual optimization has stepped no optimizer.
        AttributeError: (in the run) the module has no such attribute.

    Example:
        >>> class FineTuneLearningRateFinder(LearningRateFinder):
        ...     def __init__(self, milestones, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.milestones = milestones
        ...
        ...     def on_fit_start(self, trainer, module):
        ...         pass
        ...
        ...     def on_train_epoch_start(self, trainer, module):
        ...         if trainer.current_epoch in self.milestones:
        ...             self.lr_find(trainer, module)
        >>> FineTuneLearningRateFinder(milestones=(5, 10), num_training_steps=50).state_key
        'FineTuneLearningRateFinder'

    Source:
        Smith: Cyclical Learning Rates for Training Neural Networks, WACV 2017 (https://arxiv.org/abs/1506.01186).
    """

    SUPPORTED_MODES = _MODES
    runs_first = True

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] | str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> None:
        mode = str(mode).lower()
        if mode not in _MODES:
            raise SettingError(f"`mode` should be either of {_MODES}, got {mode!r}", field="mode", got=mode)
        for field, rate in (("min_lr", min_lr), ("max_lr", max_lr)):
            above_zero("above 0")(field, rate)
        if min_lr == max_lr:
            raise wrong("max_lr", max_lr, f"a rate other than min_lr={min_lr!r}: there is nothing to choose from")
        if min_lr > max_lr:  # falling rates are allowed, since Lightning's own tests use them
            warn_user(
                f"min_lr={min_lr!r} is above max_lr={max_lr!r}: the rates fall from step to step, from the highest"
            )
        if early_stop_threshold is not None and not is_number(early_stop_threshold):
            raise wrong("early_stop_threshold", early_stop_threshold, "a number, or None")
        self._rates = _Rates(float(min_lr), float(max_lr), at_least(1)("num_training_steps", num_training_steps), mode)
        self._early_stop_threshold = early_stop_threshold
        self._update_attr = FLAG("update_attr", update_attr)
        if update_attr and num_training_steps < _FEWEST:
            warn_user(
                f"{num_training_steps} steps are too few for a suggestion, which leaves out the first {_SKIP_BEGIN} "
                f"and the last {_SKIP_END}: the learning rate stays as it is. Take {_FEWEST} or more (100 is usual)"
            )
        self._attr_name = attr_name
        self.optimal_lr: LRFinder | None = None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        refuse_twice(self, LearningRateFinder, trainer)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.lr_find(trainer, module)

    def check(self, module: TrainModule, datamodule: Any = None) -> str:
        """Return the name of the attribute that gets the rate; "" if no attribute does.

        Raises:
            AttributeError: there is no such attribute.
        """
        return _attribute(self._attr_name, module, datamodule) if self._update_attr else ""

    def apply(self, module: TrainModule, datamodule: Any = None) -> float | None:
        """Write the suggestion, if there is one, into the attribute, and return it."""
        if self.optimal_lr is None or not self._update_attr:
            return None
        rate = self.optimal_lr.suggestion()
        for place in holders(self.check(module, datamodule), module, datamodule) if rate is not None else ():
            place(rate)
        return rate

    def lr_find(self, trainer: Trainer, module: TrainModule) -> None:
        """Search for a learning rate now: at the start of fit, or at the start of an epoch. Collective."""
        if trainer.fast_dev_run:
            warn_user("Skipping learning rate finder since `fast_dev_run` is enabled.")
            return
        trial = trainer.trial()
        if trial.repeats:
            return
        self.check(module, trainer.datamodule)
        if len(trainer.optimizers) != 1:
            raise HookError(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers, but the learning rate finder "
                "only works with single optimizer."
            )
        with trial:
            found = self._try(trial.step, trial.optimizers[0].param_groups)
        if found is None:
            return
        if trial.optimizer_steps == 0 and not module.automatic_optimization:
            raise UsageError(
                f"{len(found.results['loss'])} calls of {type(module).__name__}.training_step stepped no optimizer, so "
                "the losses say nothing about learning rates. In manual optimization call self.optimizers().step() in "
                "it, or try more steps than it accumulates batches."
            )
        self.optimal_lr = found
        suggestion = self.apply(module, trainer.datamodule)
        if suggestion is not None:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            set_learning_rates(trainer.optimizers, schedulers, suggestion)
            print_text(trainer, f"LearningRateFinder: learning rate set to {suggestion:g}")

    def _try(self, step: Callable[[], float | None], groups: Sequence[dict[str, Any]]) -> LRFinder | None:
        """Train one step with each rate; return None if the trial was ended early."""
        rates, threshold = self._rates, self._early_stop_threshold
        found = LRFinder(rates.mode, rates.first, rates.last, rates.count)
        mean = best = 0.0
        for index in range(rates.count):
            rate = rates.at(index)
            for group in groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            loss = step()
            if loss is None:
                return None
            found.results["lr"].append(rate)
            if math.isnan(loss):
                smoothed = loss  # the batch gave no loss, and the mean goes on without it
            else:
                mean = _BETA * mean + (1 - _BETA) * loss
                smoothed = mean / (1 - _BETA ** (index + 2))
            found.results["loss"].append(smoothed)
            diverges = threshold is not None and (math.isinf(smoothed) or (index > 0 and smoothed > threshold * best))
            if diverges:
                log.info("LR finder stopped early after %d steps due to diverging loss.", index + 1)
                break
            if index == 0 or smoothed < best:
                best = smoothed
        return found

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        if self.optimal_lr is None:
            return {}
        found = self.optimal_lr
        points = torch.tensor([found.results["lr"], found.results["loss"]], dtype=torch.float64)
        return {"mode": found.mode, "range": [found.lr_min, found.lr_max, found.num_training], "points": points}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        first, last, count = state_dict["range"]
        found = self.optimal_lr = LRFinder(state_dict["mode"], float(first), float(last), int(count))
        found.results["lr"], found.results["loss"] = state_dict["points"].tolist()
        if self._module is not None:  # called before the module's optimizers are made
            self.apply(self._module, self._module.trainer.datamodule)


class _Rates:
    """The learning rates of a search.

    Args:
        first, last: the ends.
        count: how many.
        mode: "exponential" or "linear".
    """

    def __init__(self, first: float, last: float, count: int, mode: str) -> None:
        self.first, self.last, self.count, self.mode = first, last, count, mode

    def at(self, index: int) -> float:
        """Return the rate of step `index`: the lowest at first, then (step + 1) / count of the way to the highest.

        Source: as Lightning's scheduler has it, so that both try the same rates.
        """
        if index == 0:
            return self.first
        way = (index + 1) / self.count
        if self.mode == "linear":
            return self.first + way * (self.last - self.first)
        return self.first * (self.last / self.first) ** way


def _attribute(name: str, module: TrainModule, datamodule: Any) -> str:
    """Return the name of the attribute that has the learning rate."""
    for one in (name,) if name else _NAMES:
        if holders(one, module, datamodule):
            return one
    if name:
        raise AttributeError(
            f"The attribute name for the learning rate was set to {name}, but could not find this as a field in "
            f"`model` or `model.hparams`.{near_names(name, module, datamodule)}"
        )
    raise AttributeError(
        f"When using the learning rate finder, either `model` or `model.hparams` should have one of these fields: "
        f"{_NAMES}. If your model has a different name for the learning rate, set it with `attr_name=...`; "
        "update_attr=False writes it nowhere."
    )


def refuse_twice(callback: Callback, kind: type[Callback], trainer: Trainer) -> None:
    """Raise a SettingError if two callbacks of a class search for the same setting under one state key."""
    if sum(isinstance(each, kind) and each.state_key == callback.state_key for each in trainer.callbacks) > 1:
        raise SettingError(
            f"two {type(callback).__name__} would look for the same setting, one after the other, and keep what they "
            "find under the same key. Leave one of them out.",
            field="callbacks",
        )


def near_names(name: str, *owners: Any) -> str:
    """Return similar names among the attributes and hyperparameters of modules and datamodules."""
    known = {key for owner in owners if owner is not None for key in (*vars(owner), *owner.hparams)}
    near = get_close_matches(name, sorted(key for key in known if isinstance(key, str) and key[:1] != "_"), 3)
    return f" There is {' and '.join(near)}." if near else ""


def holders(name: str, *owners: Any) -> list[Callable[..., Any]]:
    """Find the modules, datamodules and hyperparameters that have a setting of this name.

    Args:
        name: such as "lr" or "batch_size".
        owners: where it may be; None is passed over.

    Returns:
        A function for each place: called without an argument it returns the value there, with one it sets it. The
        datamodule's come last, and theirs is the value that counts.

    Example:
        >>> from instep.utils.hparams import HyperParameters
        >>> class Model(HyperParameters):
        ...     def __init__(self, lr=0.1):
        ...         self.save_hyperparameters()
        >>> model = Model()
        >>> [place] = holders("lr", model)
        >>> place(0.5)
        >>> place(), model.hparams.lr
        (0.5, 0.5)
    """

    def attribute(owner: Any) -> Callable[..., Any]:
        return lambda *value: setattr(owner, name, *value) if value else getattr(owner, name)

    def entry(hparams: dict[str, Any]) -> Callable[..., Any]:
        return lambda *value: hparams.__setitem__(name, *value) if value else hparams[name]

    found: list[Callable[..., Any]] = []
    for owner in owners:
        if owner is not None and hasattr(owner, name):
            found.append(attribute(owner))
        if owner is not None and name in owner.hparams:
            found.append(entry(owner.hparams))
    return found
