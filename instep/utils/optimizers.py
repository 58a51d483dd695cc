"""When a schedule steps, changes of learning rates during a schedule, and a proxy that passes for an optimizer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from instep.errors import SettingError
from instep.utils.optimizer_state import check_alike

# Keys of an optimizer's group under which schedulers keep rates.
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")


@dataclass
class LRSchedulerConfig:
    """A learning-rate scheduler and when it steps.

    Args:
        scheduler: anything with `step`, `state_dict` and `load_state_dict`.
        name: what LearningRateMonitor calls it.
        interval: `step`, counted in optimizer steps, or `epoch`; by default what the scheduler's class says by an
            attribute of this name, as those of `instep.schedules` do, else `epoch`.
        frequency: it steps every so many intervals.
        monitor: the logged metric that a plateau scheduler is given.
        strict: whether a missing metric is an error, or a warning and no step.
        reduce_on_plateau: whether it is given the metric, like `ReduceLROnPlateau`.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False


def set_learning_rates(optimizers: Sequence[Optimizer], schedulers: Sequence[Any], lr: float | Sequence[float]) -> None:
    """Set another learning rate in optimizers; schedules continue as if they had begun with this rate.

    Args:
        optimizers: their groups' rates are replaced.
        schedulers: torch's, of these optimizers.
        lr: what would be passed to the optimizer (for OneCycleLR its `max_lr`): one for all, or one for each group of
            all optimizers in turn.

    Raises:
        SettingError: there are more or fewer rates than groups.
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
        # A cosine schedule ends at `eta_min`, which does not scale with its first rate.
        floor = max((float(getattr(leaf, "eta_min", 0.0)) for leaf in own if id(leaf) in active), default=0.0)
        now = new if old == floor else floor + (float(group["lr"]) - floor) * (new - floor) / (old - floor)
        places: list[tuple[Any, Any]] = [(group, key) for key in RATES[1:] if key in group]
        for leaf in own:
            kept = (getattr(leaf, "base_lrs", None), getattr(leaf, "max_lrs", None))
            places += [(values, index) for values in kept if values is not None]
        # Read all values before setting any: in torch 2.9 a schedule's base rate can be the same tensor as the group's
        # rate.
        scaled = [_scaled(float(into[key]), old, new) for into, key in places]
        for (into, key), value in zip((*places, (group, "lr")), (*scaled, now), strict=True):
            put_rate(into, key, value)
    note_rates((*schedulers, *leaves))


def note_rates(schedulers: Iterable[Any], optimizer: Optimizer | None = None) -> None:
    """Make schedulers report the optimizer's present rates as their last ones."""
    for scheduler in schedulers:
        owner = getattr(scheduler, "optimizer", None)
        if hasattr(scheduler, "_last_lr") and owner is not None and (optimizer is None or optimizer is owner):
            scheduler._last_lr = [_value(group["lr"]) for group in owner.param_groups]


def rates_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups' learning rates and the values that schedulers keep in the groups, for `put_rates`."""
    return [{key: _value(group[key]) for key in RATES if key in group} for group in optimizer.param_groups]


def put_rates(optimizer: Optimizer, rates: Sequence[dict[str, Any]]) -> None:
    """Restore the rates that `rates_of` took from an optimizer."""
    for group, own in zip(optimizer.param_groups, rates, strict=True):
        for key, value in own.items():
            put_rate(group, key, value)


def checked_schedule(scheduler: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a schedule's saved state; TypeError if another kind of schedule saved it."""
    own = scheduler.state_dict()
    check_alike(own, saved, type(scheduler))
    # SequentialLR and ChainedScheduler save their parts under this key
    if "_schedulers" in own and "_schedulers" in saved:
        for part, state in zip(scheduler._schedulers, saved["_schedulers"], strict=True):
            checked_schedule(part, state)
    return saved


def follow_schedule(scheduler: Any) -> None:
    """Set the present rates of a restored schedule in an optimizer that was not restored."""
    rates = getattr(scheduler, "_last_lr", None)
    base = next((leaf.base_lrs for leaf in leaves_of(scheduler) if hasattr(leaf, "base_lrs")), None)
    if rates is None:
        return
    for index, group in enumerate(scheduler.optimizer.param_groups):
        put_rate(group, "lr", rates[index])
        if base is not None:
            put_rate(group, "initial_lr", base[index])


def leaves_of(scheduler: Any) -> Iterator[Any]:
    """Return the schedulers that compute rates: those inside SequentialLR and ChainedScheduler."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts is None:
        yield scheduler
    else:
        for part in parts:
            yield from leaves_of(part)


def active_leaves(scheduler: Any) -> Iterator[Any]:
    """Return the leaf schedulers that are active now."""
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
    """Set a rate in a group or a list, in place where it is a tensor."""
    current = into.get(key) if isinstance(into, dict) else into[key]
    if isinstance(current, Tensor):  # a tensor stays on the device for captured CUDA graphs
        current.fill_(value)
    else:
        into[key] = float(value)


class OptimizerProxy:
    """Proxy that passes for an optimizer: `isinstance(proxy, torch.optim.Adam)` holds, and attributes are forwarded.

    So a scheduler accepts the proxy or the optimizer, and code that reads `param_groups` works with both.

    Args:
        optimizer: what it stands for.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while the proxy is being copied, this attribute is not set yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
