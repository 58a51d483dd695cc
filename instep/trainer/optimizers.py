"""Optimizers and schedulers of a run: reading `configure_optimizers`, stepping schedulers, manual optimization."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    "'lr_scheduler' and 'monitor'; a list of such dicts; or None"
)
_UNKNOWN = "Unknown configuration for model optimizers"
_OPTIMIZER_KEYS = ("optimizer", "lr_scheduler", "monitor", "frequency")
_SCHEDULER_KEYS = ("scheduler", "name", "interval", "frequency", "monitor", "strict", "reduce_on_plateau")


class OptimizerSetup(NamedTuple):
    """Optimizers and schedulers of a run."""

    optimizers: list[Optimizer]
    schedulers: list[LRSchedulerConfig]


# ---- configure_optimizers


def configure(result: Any, module: nn.Module) -> OptimizerSetup:
    """Read the optimizers and schedulers that `configure_optimizers` returned.

    Args:
        result: an optimizer; a list of optimizers; `([optimizers], [schedulers])`; a dict with `optimizer` and perhaps
            `lr_scheduler` (a scheduler, or a dict with the fields of `LRSchedulerConfig`) and `monitor`; a list of such
            dicts; or None to train nothing. In automatic optimization, several optimizers step together, with the
            gradients of one loss.
        module: the module, placed on its device.

    Raises:
        HookError: any other form, unknown keys, a scheduler of another optimizer, a plateau scheduler without a
            monitor; if several optimizers step together: a frequency, a parameter in two of them, or an optimizer that
            evaluates the loss itself, such as LBFGS.

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
    together = len(optimizers) > 1 and automatic
    _refuse_turns(result, together)
    if together:
        _check_together(optimizers, module)
    configs = [_scheduler_config(*given, optimizers, automatic) for given in schedulers]
    _warn_about_parameters(optimizers, module)
    return OptimizerSetup(optimizers, configs)


def _refuse_turns(result: Any, several: bool) -> None:
    """Raise HookError if an optimizer's dict has a `frequency`: with this, optimizers took turns in Lightning 1.

    With a single optimizer, or in manual optimization, only warn.
    """
    items = [result] if isinstance(result, Mapping | Optimizer) else result
    if all(not isinstance(item, Mapping) or item.get("frequency") is None for item in items):
        return
    if several:
        raise HookError(
            "configure_optimizers gave an optimizer a 'frequency': several optimizers step together, in every "
            "window. Step them yourself, as often as you like: set self.automatic_optimization = False and call "
            "self.optimizers()[0].step() in training_step (docs/train/manual_optimization.md)."
        )
    warn_user("configure_optimizers: the 'frequency' of an optimizer is not used; that of a scheduler is")


def _check_together(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise HookError if several optimizers cannot step together from one loss."""
    for optimizer in optimizers:
        if wants_closure(optimizer):
            raise HookError(
                f"configure_optimizers returned {len(optimizers)} optimizers, which step together, but "
                f"{type(optimizer).__name__} evaluates the loss within its step. Set "
                "self.automatic_optimization = False, and step them in training_step."
            )
    seen: set[Tensor] = set()
    for optimizer in optimizers:
        mine = parameters_of(optimizer)
        if not seen.isdisjoint(mine):
            both: Any = next(p for p in mine if p in seen)
            name = names_of(module).get(both, "one outside the module")
            raise HookError(
                f"configure_optimizers: the parameter {name} is in two optimizers that step together from one loss. "
                "Leave it to one of them; or set self.automatic_optimization = False, and step them in training_step."
            )
        seen.update(mine)


def wants_closure(optimizer: Optimizer | None) -> bool:
    """Return True if the optimizer evaluates the loss itself, as L-BFGS does: its `step` requires a closure."""
    step = getattr(type(optimizer), "step", None)
    asked = inspect.signature(step).parameters.get("closure") if inspect.isfunction(step) else None
    return asked is not None and asked.default is inspect.Parameter.empty


def _parts(result: Any) -> tuple[list[Optimizer], list[tuple[Any, str | None]]]:
    """Return the optimizers, and pairs of a scheduler and the `monitor` in the optimizer's dict (None without one)."""
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
        beside = [
            (item["lr_scheduler"], item.get("monitor")) for item in result if item.get("lr_scheduler") is not None
        ]
        return [item["optimizer"] for item in result], beside
    if len(result) == 2 and isinstance(result[0], list | tuple) and all(isinstance(o, Optimizer) for o in result[0]):
        schedulers = result[1] if isinstance(result[1], list | tuple) else [result[1]]
        return list(result[0]), [(scheduler, None) for scheduler in schedulers]
    kinds = ", ".join(_kind(item) for item in result)
    raise HookError(f"{_UNKNOWN}: configure_optimizers returned a {type(result).__name__} of {kinds}. Return {_FORMS}.")


def _scheduler_config(
    given: Any, monitor: str | None, optimizers: Sequence[Optimizer], automatic: bool
) -> LRSchedulerConfig:
    fields = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    _check_keys(fields, "The lr scheduler dict", _SCHEDULER_KEYS)
    scheduler = fields["scheduler"]
    kind = type(scheduler).__name__
    fields.setdefault("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
    fields.setdefault("interval", getattr(type(scheduler), "interval", "epoch"))
    if fields.get("monitor") is None:
        fields["monitor"] = monitor
    config = LRSchedulerConfig(**fields)
    lacking = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
    if lacking:
        raise HookError(f"configure_optimizers: the scheduler {_kind(scheduler)} has no {', '.join(lacking)}")
    owner = getattr(scheduler, "optimizer", None)
    if isinstance(owner, Optimizer) and all(owner is not optimizer for optimizer in optimizers):
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
    from instep.utils.trainable import hidden_parameters, say_hidden  # imported late: only a fit needs it

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
        interval: `step` after an optimizer step, `epoch` after an epoch.
        count: number of optimizer steps or epochs so far, including the one that has just ended.
        metrics: the logged metrics, for plateau schedulers.
        module_hook: the module's `lr_scheduler_step(scheduler, metric)` if it is overridden.

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
    """Wrapper of an optimizer in manual optimization, as `self.optimizers()` returns it. The Trainer counts its steps.

    All other attributes are those of the original optimizer, and `isinstance(opt, torch.optim.Adam)` holds.

    Args:
        optimizer: the optimizer.
        module: the module, for `toggle_model`.
        on_step: called as `on_step(optimizer, closure, **kwargs)` in place of the optimizer's own step.
        no_sync: context manager of the strategy in which gradients are not reduced over processes.
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
        """Run the optimizer's step through the strategy and its precision, and count it in the Trainer's `global_step`.

        Args:
            closure: function that runs the model again and returns the loss, for optimizers that need it.
            kwargs: passed to the optimizer's step.

        Returns:
            The loss that the closure returned first; None without a closure.
        """
        if self.on_step is None:
            return self.optimizer.step(closure=closure, **kwargs)
        return self.on_step(self.optimizer, closure, **kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Make only this optimizer's parameters require gradients in a `with` block.

        Args:
            sync_grad: whether gradients are reduced over processes; False while accumulating.
        """
        self._module.toggle_optimizer(self)
        try:
            with nullcontext() if sync_grad else self._no_sync():
                yield
        finally:
            self._module.untoggle_optimizer(self)
