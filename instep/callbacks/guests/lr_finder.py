"""`LearningRateFinder`: find a learning rate by one trial step with each of many rates."""

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
_BETA = 0.98  # decay of the exponential moving average of the losses
_SKIP_BEGIN, _SKIP_END = 10, 1  # number of points at each end of the curve that `suggestion` ignores
_FEWEST = _SKIP_BEGIN + 2 + _SKIP_END  # least number of points in a search: a slope needs two points


class LRFinder:
    """The result of a learning-rate search: the loss at each learning rate, and the rate to use.

    Args:
        mode: "exponential" or "linear": how the rate grew from step to step.
        lr_min: the first rate.
        lr_max: the last rate.
        num_training: number of steps from the first rate to the last.

    Attributes:
        results: a dict with two lists: "lr", the rates, and "loss", the smoothed loss at each rate.

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
        """Return the rate at which the loss falls most steeply; points with a loss that is not finite are ignored.

        Args:
            skip_begin: points to ignore at the beginning, where the loss is averaged over few steps.
            skip_end: points to ignore at the end, where the loss may already grow.

        Returns:
            The learning rate; None if fewer than two points are left, with an error message in the log.
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
            suggest: mark the suggested rate with a red point.
            show: open a window with the figure.
            ax: the matplotlib Axes to draw on. None: the Axes of a new figure.

        Returns:
            The matplotlib figure.

        Raises:
            MissingPackageError: matplotlib is not installed.
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
    """Find a learning rate before training, by trial steps with growing rates that are undone afterwards.

    The loss at each step is the mean over its micro-batches and all ranks, smoothed by an exponential moving average.
    The suggested rate is written into the module's attribute and into the optimizer; learning-rate schedulers continue
    as if this had been their initial rate. All other effects of the trial steps are undone. A resumed run keeps the
    rate and does not search again.

    To search at other epochs too, call `lr_find(trainer, module)` in `on_train_epoch_start` of a subclass.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        num_training_steps: optimizer steps from the first rate to the last; a suggestion needs 13 or more.
        mode: "exponential": the rate is multiplied by the same factor at each step. "linear": the same number is added.
        early_stop_threshold: end the search when the smoothed loss is more than this factor times the smallest one, or
            is infinite. None: try all rates.
        update_attr: write the suggested rate into the module.
        attr_name: name of the attribute of the module, the datamodule or their `hparams` that holds the rate. "": use
            `lr` or `learning_rate`, whichever exists.
        weights_only: an argument of Lightning's, where the search writes a checkpoint; it has no effect here.

    Attributes:
        optimal_lr: the result, an `LRFinder`; None before the search.

    Raises:
        SettingError: an argument is wrong. (At the start of the run:) another callback searches for the rate too.
        HookError: (in the run) the module does not have exactly one optimizer.
        UsageError: (in the run) in manual optimization, no trial step called an optimizer's `step`.
        AttributeError: (in the run) the module has no attribute for the rate.

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
        if min_lr > max_lr:  # only a warning, since Lightning's own tests use falling rates
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
        """Return the name of the attribute to write the rate into; "" if `update_attr` is False.

        Raises:
            AttributeError: neither the module nor the datamodule has the attribute.
        """
        return _attribute(self._attr_name, module, datamodule) if self._update_attr else ""

    def apply(self, module: TrainModule, datamodule: Any = None) -> float | None:
        """Write the suggested rate into the attribute and return it; return None if there is no suggestion."""
        if self.optimal_lr is None or not self._update_attr:
            return None
        rate = self.optimal_lr.suggestion()
        for place in holders(self.check(module, datamodule), module, datamodule) if rate is not None else ():
            place(rate)
        return rate

    def lr_find(self, trainer: Trainer, module: TrainModule) -> None:
        """Search for a learning rate now. Call it on all ranks, at the start of fit or of an epoch."""
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
        """Train one step with each rate, and return the results; return None if the run was interrupted."""
        rates, threshold = self._rates, self._early_stop_threshold
        found = LRFinder(rates.mode, rates.first, rates.last, rates.count)
        mean, best, losses = 0.0, math.inf, 0
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
                smoothed = loss  # the step had no loss, so the average does not change
            else:
                mean, losses = _BETA * mean + (1 - _BETA) * loss, losses + 1
                smoothed = mean / (1 - _BETA ** (losses + 1))
            found.results["loss"].append(smoothed)
            if threshold is not None and (math.isinf(smoothed) or smoothed > threshold * best):
                log.info("LR finder stopped early after %d steps due to diverging loss.", index + 1)
                break
            best = min(best, smoothed)  # if `smoothed` is nan, `best` does not change
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
        if self._module is not None:  # set the rate now, before the module makes its optimizers
            self.apply(self._module, self._module.trainer.datamodule)


class _Rates:
    """The learning rates that a search tries.

    Args:
        first, last: the first rate and the last rate.
        count: number of rates.
        mode: "exponential" or "linear".
    """

    def __init__(self, first: float, last: float, count: int, mode: str) -> None:
        self.first, self.last, self.count, self.mode = first, last, count, mode

    def at(self, index: int) -> float:
        """Return the rate of trial step `index`, from 0.

        Step 0 has the rate `first`. Each later step has the rate at the fraction (index + 1) / count of the way from
        `first` to `last`.

        Source: the same rates as those of Lightning's learning-rate finder.
        """
        if index == 0:
            return self.first
        way = (index + 1) / self.count
        if self.mode == "linear":
            return self.first + way * (self.last - self.first)
        return self.first * (self.last / self.first) ** way


def _attribute(name: str, module: TrainModule, datamodule: Any) -> str:
    """Return the name of the attribute of the module or the datamodule that holds the learning rate."""
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
    """Raise a SettingError if two callbacks of class `kind` have the same state key."""
    if sum(isinstance(each, kind) and each.state_key == callback.state_key for each in trainer.callbacks) > 1:
        raise SettingError(
            f"two {type(callback).__name__} would look for the same setting, one after the other, and keep what they "
            "find under the same key. Leave one of them out.",
            field="callbacks",
        )


def near_names(name: str, *owners: Any) -> str:
    """Return a sentence with names of attributes or hyperparameters similar to `name`, for an error text."""
    known = {key for owner in owners if owner is not None for key in (*vars(owner), *owner.hparams)}
    near = get_close_matches(name, sorted(key for key in known if isinstance(key, str) and key[:1] != "_"), 3)
    return f" There is {' and '.join(near)}." if near else ""


def holders(name: str, *owners: Any) -> list[Callable[..., Any]]:
    """Find an attribute or hyperparameter by its name in the module and the datamodule.

    Args:
        name: name of the attribute or hyperparameter, such as "lr" or "batch_size".
        owners: the module and the datamodule, in this order; None is skipped.

    Returns:
        A function for each place where the name was found: called without an argument it returns the value, called
        with an argument it sets the value. Functions for the datamodule come last.

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
