"""Strategies by name. Adding one is a file beside this one and a line in `_FACTORIES`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from instep.errors import SettingError, one_of
from instep.strategies.base import Strategy
from instep.strategies.ddp import DDPStrategy
from instep.strategies.fsdp import FSDPStrategy

_FACTORIES: dict[str, Callable[[], Strategy]] = {
    "single_device": Strategy,
    "ddp": DDPStrategy,
    "ddp_find_unused_parameters_true": partial(DDPStrategy, find_unused_parameters=True),
    "ddp_find_unused_parameters_false": partial(DDPStrategy, find_unused_parameters=False),
    "fsdp": FSDPStrategy,
}


def register_strategy(name: str, factory: Callable[[], Strategy]) -> None:
    """Make a strategy known under a name.

    Args:
        name: what `Trainer(strategy=...)` takes.
        factory: makes a fresh strategy; usually the class.

    Raises:
        SettingError: the name is taken.

    Example:
        >>> register_strategy("my_ddp", DDPStrategy)
    """
    if name in _FACTORIES or name == "auto":
        raise SettingError(f"a strategy named {name!r} is registered already; choose another name", field="name")
    _FACTORIES[name] = factory


def strategy_names() -> tuple[str, ...]:
    """All names that `Trainer(strategy=...)` takes."""
    return ("auto", *_FACTORIES)


def resolve_strategy(strategy: str | Strategy, world_size: int) -> Strategy:
    """The strategy for a name or an instance; `auto` is a single device with one process and DDP with more.

    Raises:
        SettingError: the name is unknown, or the strategy cannot run with so many processes.
    """
    if strategy == "auto":
        strategy = "ddp" if world_size > 1 else "single_device"
    if isinstance(strategy, str):
        if strategy not in _FACTORIES:
            raise one_of("strategy", strategy, strategy_names())
        strategy = _FACTORIES[strategy]()
    if not isinstance(strategy, Strategy):
        raise SettingError(
            f"strategy={strategy!r} must be a name ({', '.join(strategy_names())}) or an instep.Strategy",
            field="strategy",
            got=strategy,
        )
    strategy.check_world_size(world_size)
    return strategy
