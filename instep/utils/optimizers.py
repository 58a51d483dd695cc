"""Helpers for learning-rate schedulers, changes of learning rates during a run, and a proxy class for optimizers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from instep.errors import SettingError
from instep.utils.optimizer_state import check_alike

# Keys of a parameter group in which schedulers store learning rates.
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")


@dataclass
class LRSchedulerConfig:
    """A learning-rate scheduler and when it steps.

    Args:
        scheduler: object with `step`, `state_dict` and `load_state_dict`.
        name: name of the rate in LearningRateMonitor.
        interval: "step" (optimizer step) or "epoch". By default the attribute `interval` of the scheduler's class, as
            in `instep.schedules`, else "epoch".
        frequency: number of intervals from one step of the scheduler to the next.
        monitor: name of the logged metric to pass to a plateau scheduler.
        strict: True: a missing metric is an error. False: warn, and do not step the scheduler.
        reduce_on_plateau: whether to pass the metric to `step`, as for `ReduceLROnPlateau`.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False


def set_learning_rates(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], lr: float | Sequence[float]) -> None:
    """Set new learning rates in optimizers; schedulers continue as if they had begun with these rates.

    Args:
        optimizers: optimizers whose groups get the new rates.
        schedulers: torch's schedulers of these optimizers.
        lr: rate as it would be passed to the optimizer (or to OneCycleLR as `max_lr`): one for all groups, or one for
            each group of all optimizers, in order.

    Raises:
        SettingError: the number of rates differs from the number of groups.
    """
    owners = [(optimizer, group) for optimizer in optimizers for group in range(len(optimizer.param_groups))]
    rates = [lr] * len(owners) if isinstance(lr, float | int) else list(lr)
    if len(rates) != len(owners):
        raise SettingError(
            f"lr has {len(rates)} learning rates, and the optimizers have {len(owners)} parameter groups. Give one for "
            "each group, or a single number for all.",
            field="lr",
            got=lr,
        )
    leaves = [leaf for scheduler in schedulers for leaf in leaves_of(scheduler)]
    active = {id(leaf) for scheduler in schedulers for leaf in active_leaves(scheduler)}
    for (optimizer, index), new in zip(owners, rates, strict=True):
        group = optimizer.param_groups[index]
        own = [leaf for leaf in leaves if getattr(leaf, "optimizer", None) is optimizer]
        old = float(group["max_lr"] if "max_lr" in group else group.get("initial_lr", group["lr"]))
        # `eta_min`, the last rate of a cosine schedule, does not scale with the first rate.
        floor = max((float(getattr(leaf, "eta_min", 0.0)) for leaf in own if id(leaf) in active), default=0.0)
        now = new if old == floor else floor + (float(group["lr"]) - floor) * (new - floor) / (old - floor)
        places: list[tuple[Any, Any]] = [(group, key) for key in RATES[1:] if key in group]
        for leaf in own:
            kept = (getattr(leaf, "base_lrs", None), getattr(leaf, "max_lrs", None))
            places += [(values, index) for values in kept if values is not None]
        # Read all values before setting any: in torch 2.9 a scheduler's base rate can be the same tensor as a group's
        # rate.
        scaled = [_scaled(float(into[key]), old, new) for into, key in places]
        for (into, key), value in zip((*places, (group, "lr")), (*scaled, now), strict=True):
            put_rate(into, key, value)
    note_rates((*schedulers, *leaves))


def note_rates(schedulers: Iterable[Any], optimizer: Optimizer | None = None) -> None:
    """Set the `_last_lr` of schedulers, which `get_last_lr` returns, to the current rates of their optimizers."""
    for scheduler in schedulers:
        owner = getattr(scheduler, "optimizer", None)
        if hasattr(scheduler, "_last_lr") and owner is not None and (optimizer is None or optimizer is owner):
            scheduler._last_lr = [_value(group["lr"]) for group in owner.param_groups]


def rates_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of the learning rates in an optimizer's groups, under all keys in `RATES`; for `put_rates`."""
    return [{key: _value(group[key]) for key in RATES if key in group} for group in optimizer.param_groups]


def put_rates(optimizer: Optimizer, rates: Sequence[dict[str, Any]]) -> None:
    """Set an optimizer's rates to those that `rates_of` returned earlier."""
    for group, own in zip(optimizer.param_groups, rates, strict=True):
        for key, value in own.items():
            put_rate(group, key, value)


def checked_schedule(scheduler: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Check the saved state of a scheduler and return it; raise TypeError if another class of scheduler saved it."""
    own = scheduler.state_dict()
    check_alike(own, saved, type(scheduler))
    # SequentialLR and ChainedScheduler save the states of their inner schedulers under the key `_schedulers`.
    if "_schedulers" in own and "_schedulers" in saved:
        for part, state in zip(scheduler._schedulers, saved["_schedulers"], strict=True):
            checked_schedule(part, state)
    return saved


def follow_schedule(scheduler: Any) -> None:
    """Set the rates in an optimizer to those of its scheduler, which was restored without the optimizer."""
    rates = getattr(scheduler, "_last_lr", None)
    base = next((leaf.base_lrs for leaf in leaves_of(scheduler) if hasattr(leaf, "base_lrs")), None)
    if rates is None:
        return
    for index, group in enumerate(scheduler.optimizer.param_groups):
        put_rate(group, "lr", rates[index])
        if base is not None:
            put_rate(group, "initial_lr", base[index])


def leaves_of(scheduler: Any) -> Iterator[Any]:
    """Yield the schedulers that compute rates: `scheduler` itself, or those in a SequentialLR or ChainedScheduler."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts is None:
        yield scheduler
    else:
        for part in parts:
            yield from leaves_of(part)


def active_leaves(scheduler: Any) -> Iterator[Any]:
    """Yield those schedulers of `leaves_of` that compute the current rates: the active one of a SequentialLR."""
    milestones = getattr(scheduler, "_milestones", None)
    if milestones is None:
        yield from leaves_of(scheduler)
    else:
        yield from active_leaves(scheduler._schedulers[bisect_right(milestones, scheduler.last_epoch)])


def _scaled(value: float, old: float, new: float) -> float:
    return new if value == old or old == 0 else value * (new / old)


def _value(rate: Any) -> Any:
    return rate.clone() if isinstance(rate, Tensor) else rate


def put_rate(into: Any, key: Any, value: Any) -> None:
    """Set a rate in a parameter group or a list; a tensor is changed in place."""
    current = into.get(key) if isinstance(into, dict) else into[key]
    if isinstance(current, Tensor):  # keep the same tensor, since a CUDA graph may use it
        current.fill_(value)
    else:
        into[key] = float(value)


class OptimizerProxy:
    """Base class of proxies for an optimizer: `isinstance(proxy, torch.optim.Adam)` is True for a proxy of Adam.

    Attributes are read from the optimizer. So schedulers accept the proxy, and code that reads `param_groups` works.

    Args:
        optimizer: the optimizer behind the proxy.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while the proxy is copied, this attribute is not set yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
