"""Optimizers and schedulers of a run: reading `configure_optimizers`, stepping schedulers, manual optimization."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from instep.errors import HookError, SettingError
from instep.strategies.gradients import parameters_of
from instep.utils.optimizer_state import names_of
from instep.utils.optimizers import LRSchedulerConfig, OptimizerProxy
from instep.utils.warn import warn_user

_FORMS = (
    "an optimizer; a list of optimizers; two lists ([optimizers], [schedulers]); a dict with 'optimizer' and perhaps "
    "'lr_scheduler', 'monitor' and 'frequency'; a list of such dicts; or None"
)
_UNKNOWN = "Unknown configuration for model optimizers"
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")
_SCHEDULER_KEYS = ("scheduler", "name", "interval", "frequency", "monitor", "strict", "reduce_on_plateau")


class Turns:
    """Order in which optimizers take turns: each has so many optimizer windows in a row, then the next one does.

    It depends on the number of the window alone, so that a resumed run goes on within a turn.

    Args:
        frequencies: windows in a row, of each optimizer.

    Example:
        >>> turns = Turns([1, 2])
        >>> [turns.at(window) for window in range(6)], turns.taken(1, 5)
        ([0, 1, 1, 0, 1, 1], 3)
    """

    def __init__(self, frequencies: Sequence[int]) -> None:
        self.frequencies = tuple(frequencies)
        self._ends = list(accumulate(self.frequencies))

    def at(self, window: int) -> int:
        """Return the index of the optimizer that has a window, which is counted from 0."""
        return bisect_right(self._ends, window % self._ends[-1])

    def taken(self, index: int, windows: int) -> int:
        """Return how many of the first `windows` windows were those of one optimizer."""
        rounds, rest = divmod(windows, self._ends[-1])
        own = self.frequencies[index]
        return rounds * own + min(max(rest - (self._ends[index] - own), 0), own)


class OptimizerSetup(NamedTuple):
    """The optimizers and schedulers of a run; `turns` where the optimizers take turns."""

    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]
    turns: Turns | None = None


# ---- configure_optimizers


def configure(result: Any, module: nn.Module) -> OptimizerSetup:
    """Read the optimizers and schedulers that `configure_optimizers` returned.

    Args:
        result: an optimizer; a list of optimizers; `([optimizers], [schedulers])`; a dict with `optimizer` and perhaps
            `lr_scheduler` (a scheduler, or a dict with the fields of `LRSchedulerConfig`), `monitor` and `frequency`; a
            list of such dicts; or None to train nothing. In automatic optimization several optimizers step together,
            from one loss; where each dict has a `frequency` they take turns of so many optimizer windows.
        module: the module, placed on its device.

    Raises:
        HookError: any other form, unknown keys, a scheduler of another optimizer, a plateau scheduler without a
            monitor; with automatic optimization a frequency for some optimizers only, and of optimizers that step
            together a parameter in two of them, or one that evaluates the loss itself, such as LBFGS.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> decay = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)
        >>> setup = configure({"optimizer": sgd, "lr_scheduler": {"scheduler": decay, "interval": "step"}}, model)
        >>> setup.schedulers[0].interval
        'step'
    """
    if result is None:
        name = f"{type(module).__name__}.configure_optimizers"
        warn_user(
            f"{name} returned None: this fit will run with no optimizer, and trains nothing. Is a `return` missing?"
        )
        return OptimizerSetup([], [])
    optimizers, schedulers = _parts(result)
    if not optimizers:
        raise HookError("configure_optimizers returned no optimizer. Return at least one, or None to train nothing.")
    automatic = getattr(module, "automatic_optimization", True)
    turns = _turns(result, automatic)
    if len(optimizers) > 1 and automatic and turns is None:
        _check_together(optimizers, module)
    configs = [_scheduler_config(*given, optimizers, automatic) for given in schedulers]
    _warn_about_parameters(optimizers, module)
    return OptimizerSetup(optimizers, configs, turns)


def _turns(result: Any, automatic: bool) -> Turns | None:
    """Read the frequencies with which optimizers take turns; None where they do not."""
    items = [result] if isinstance(result, Mapping | Optimizer) else result
    dicts = [item for item in items if isinstance(item, Mapping)]
    given = [item["frequency"] for item in dicts if item.get("frequency") is not None and "optimizer" in item]
    if not given:
        return None
    if not automatic:
        warn_user(
            "configure_optimizers: 'frequency' is not used: in manual optimization training_step steps them itself"
        )
        return None
    for frequency in given:
        if not isinstance(frequency, int) or isinstance(frequency, bool) or frequency < 1:
            raise HookError(
                f"configure_optimizers: frequency={frequency!r} of an optimizer; use the number of optimizer windows "
                "that it has in a row, an integer of at least 1"
            )
    if len(given) != len(dicts):
        raise HookError(
            f"configure_optimizers gave {len(given)} of {len(dicts)} optimizers a 'frequency'. Give it to all, and "
            "they take turns; or to none, and they all step in every window."
        )
    return Turns(given) if len(given) > 1 else None


def _check_together(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise where several optimizers cannot step together from one loss."""
    for optimizer in optimizers:
        if wants_closure(optimizer):
            raise HookError(
                f"configure_optimizers returned {len(optimizers)} optimizers, which step together, but "
                f"{type(optimizer).__name__} evaluates the loss within its step. Give each a turn: "
                "{'optimizer': ..., 'frequency': 1}; or set self.automatic_optimization = False."
            )
    seen: set[Tensor] = set()
    for optimizer in optimizers:
        mine = parameters_of(optimizer)
        if not seen.isdisjoint(mine):
            both: Any = next(p for p in mine if p in seen)
            name = names_of(module).get(both, "one outside the module")
            raise HookError(
                f"configure_optimizers: the parameter {name} is in two optimizers that step together from one loss. "
                "Leave it to one of them; or give each a turn: {'optimizer': ..., 'frequency': 1}."
            )
        seen.update(mine)


def wants_closure(optimizer: Optimizer | None) -> bool:
    """Return whether the optimizer evaluates the loss itself, as L-BFGS: its `step` cannot do without a closure."""
    step = getattr(type(optimizer), "step", None)
    asked = inspect.signature(step).parameters.get("closure") if inspect.isfunction(step) else None
    return asked is not None and asked.default is inspect.Parameter.empty


def _parts(result: Any) -> tuple[list[Optimizer], list[tuple[Any, str | None, int | None]]]:
    """Return the optimizers, and each scheduler with its monitor and the index of its optimizer, if they tell."""
    if isinstance(result, Optimizer):
        return [result], []
    if isinstance(result, Mapping):
        result = [result]
    if not isinstance(result, list | tuple):
        raise HookError(f"{_UNKNOWN}: configure_optimizers returned {_kind(result)}. Return {_FORMS}.")
    if all(isinstance(item, Optimizer) for item in result):
        return list(result), []
    if all(isinstance(item, Mapping) for item in result):
        for item in result:
            _check_keys(item, "configure_optimizers' dict", _OPTIMIZER_KEYS)
            if not isinstance(item["optimizer"], Optimizer):
                raise HookError(f"configure_optimizers: 'optimizer' is {_kind(item['optimizer'])}, not an Optimizer")
        beside: list[tuple[Any, str | None, int | None]] = [
            (item["lr_scheduler"], item.get("monitor"), index)
            for index, item in enumerate(result)
            if item.get("lr_scheduler") is not None
        ]
        return [item["optimizer"] for item in result], beside
    if len(result) == 2 and isinstance(result[0], list | tuple) and all(isinstance(o, Optimizer) for o in result[0]):
        schedulers = result[1] if isinstance(result[1], list | tuple) else [result[1]]
        return list(result[0]), [(scheduler, None, None) for scheduler in schedulers]
    kinds = ", ".join(_kind(item) for item in result)
    raise HookError(f"{_UNKNOWN}: configure_optimizers returned a {type(result).__name__} of {kinds}. Return {_FORMS}.")


def _scheduler_config(
    given: Any, monitor: str | None, index: int | None, optimizers: Sequence[Optimizer], automatic: bool
) -> LRSchedulerConfig:
    fields = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    _check_keys(fields, "The lr scheduler dict", _SCHEDULER_KEYS)
    scheduler = fields["scheduler"]
    kind = type(scheduler).__name__
    fields.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    fields.setdefault("interval", getattr(type(scheduler), "interval", "epoch"))
    if fields.get("monitor") is None:
        fields["monitor"] = monitor
    config = LRSchedulerConfig(**fields, optimizer_idx=index)
    lacking = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
    if lacking:
        raise HookError(f"configure_optimizers: the scheduler {_kind(scheduler)} has no {', '.join(lacking)}")
    owner = getattr(scheduler, "optimizer", None)
    places = [place for place, optimizer in enumerate(optimizers) if owner is optimizer]
    if places:
        config.optimizer_idx = places[0]
    elif isinstance(owner, Optimizer):
        raise HookError(
            f"configure_optimizers: {kind} is attached with an optimizer that wasn't returned. Return the "
            f"{type(owner).__name__} it was made with."
        )
    if config.interval not in ("step", "epoch"):
        raise HookError(
            f'configure_optimizers: The "interval" key in lr scheduler dict must be "step" or "epoch" but is '
            f"{config.interval!r}, of {kind}"
        )
    if not isinstance(config.frequency, int) or isinstance(config.frequency, bool) or config.frequency < 1:
        raise HookError(f"configure_optimizers: frequency={config.frequency!r} of {kind}; use an integer of at least 1")
    if not automatic:
        keys = ("frequency", "monitor", "strict", "reduce_on_plateau")
        if unused := [key for key in keys if isinstance(given, Mapping) and key in given]:
            warn_user(
                f"configure_optimizers: the lr_scheduler dict has {unused}, but the keys will be ignored: in manual "
                "optimization the module calls scheduler.step() itself",
                RuntimeWarning,
            )
        return config
    if config.reduce_on_plateau and config.monitor is None:
        raise HookError(
            f"`configure_optimizers` must include a monitor when a `{kind}` scheduler is used: it needs the name of a "
            "logged metric. Return {'optimizer': ..., "
            "'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}."
        )
    if config.monitor is not None and not config.reduce_on_plateau:
        warn_user(
            f"configure_optimizers: monitor={config.monitor!r} is not used, since {kind} is not a plateau scheduler; "
            "reduce_on_plateau=True passes the metric to its step()"
        )
    by_step = isinstance(scheduler, OneCycleLR) or getattr(type(scheduler), "interval", "") == "step"
    if by_step and config.interval == "epoch":
        warn_user(
            f"configure_optimizers: {kind} with interval='epoch' steps once per epoch; it is made for "
            "{'scheduler': ..., 'interval': 'step'}"
        )
    return config


def _check_keys(given: Mapping[Any, Any], where: str, known: tuple[str, ...]) -> None:
    unknown = [repr(key) for key in given if key not in known]
    if unknown:
        raise HookError(
            f"configure_optimizers: {where} has unknown keys {', '.join(unknown)}. Known are {', '.join(known)}."
        )
    if known[0] not in given:
        raise HookError(
            f'configure_optimizers: {where} must have the key "{known[0]}". Its keys are '
            f"{', '.join(map(repr, given)) or 'none'}."
        )


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _warn_about_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    from instep.utils.trainable import hidden_parameters, say_hidden  # late: only a fit needs it

    inside = names_of(module)
    trained = {p for optimizer in optimizers for p in parameters_of(optimizer)}
    unseen = {
        path: hidden
        for path, hidden in hidden_parameters(module).items()
        if any(p.requires_grad and p not in trained for p in hidden)
    }
    if unseen:
        warn_user(f"{say_hidden(module, unseen)}, or freeze them with .requires_grad_(False) if that is meant")
    devices = {parameter.device for parameter in inside}
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        outside = [p for p in parameters if p not in inside]
        astray = sorted({str(p.device) for p in outside if devices and p.device not in devices})
        if astray:
            warn_user(
                f"{type(optimizer).__name__} has parameters on {', '.join(astray)} that are not in the module, which "
                f"is on {', '.join(map(str, devices))}: were they made before the module moved?"
            )
        elif outside:
            warn_user(
                f"{len(outside)} parameters of {type(optimizer).__name__} are not in the module: they are trained, but "
                "not saved with it, and their optimizer state goes by position. Make them parameters of the module"
            )


# ---- schedulers


def step_schedulers(
    configs: Sequence[LRSchedulerConfig],
    interval: str,
    count: int,
    metrics: Mapping[str, Any],
    module_hook: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Step the schedulers that are due: once per optimizer step or once per epoch, never per process.

    Args:
        configs: the run's schedulers.
        interval: what has just ended: `step` (an optimizer step) or `epoch`.
        count: how many of them have ended, this one included.
        metrics: the logged metrics, for plateau schedulers.
        module_hook: the module's `lr_scheduler_step(scheduler, metric)` where it is overridden.

    Raises:
        SettingError: a strict scheduler's metric was not logged.
    """
    for config in configs:
        if config.interval != interval or count % config.frequency:
            continue
        metric = None
        if config.reduce_on_plateau:
            metric = metrics.get(config.monitor)  # pyright: ignore[reportArgumentType, reportCallIssue]
            if metric is None:
                _metric_missing(config, metrics)
                continue
        if module_hook is not None:
            module_hook(config.scheduler, metric)
        elif config.reduce_on_plateau:
            config.scheduler.step(metric)
        else:
            config.scheduler.step()


def _metric_missing(config: LRSchedulerConfig, metrics: Mapping[str, Any]) -> None:
    message = (
        f"{type(config.scheduler).__name__} conditioned on metric {config.monitor!r}, which is not available. "
        f"Available metrics are: {', '.join(sorted(metrics)) or 'none'}."
    )
    if config.strict:
        raise SettingError(
            f"{message} Log it with self.log({config.monitor!r}, ...), raise the scheduler's frequency, or set its "
            "strict=False.",
            field="monitor",
            got=config.monitor,
        )
    warn_user(f"{message} It is not stepped.", RuntimeWarning)


# ---- manual optimization


class TrainOptimizer(OptimizerProxy):
    """Optimizer of manual optimization, as `self.optimizers()` returns it: the Trainer counts its steps.

    Everything else is the optimizer's own: attributes are forwarded, and `isinstance(opt, torch.optim.Adam)` holds.

    Args:
        optimizer: the optimizer.
        module: the module, for `toggle_model`.
        on_step: called as `on_step(optimizer, closure, **kwargs)` in place of the optimizer's own step.
        no_sync: the strategy's context in which gradients are not reduced.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: Any,
        *,
        on_step: Callable[..., Any] | None = None,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(optimizer)
        self.on_step = on_step
        self._module = module
        self._no_sync = no_sync

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step through the strategy and the precision; the Trainer's `global_step` goes up.

        Args:
            closure: runs the model again and returns the loss, for optimizers that need it.
            kwargs: passed to the optimizer's step.
        """
        if self.on_step is None:
            return self.optimizer.step(closure=closure, **kwargs)
        return self.on_step(self.optimizer, closure, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Inside, only this optimizer's parameters require gradients.

        Args:
            sync_grad: whether gradients are reduced over processes; False while accumulating.
        """
        self._module.toggle_optimizer(self)
        try:
            with nullcontext() if sync_grad else self._no_sync():
                yield
        finally:
            self._module.untoggle_optimizer(self)
