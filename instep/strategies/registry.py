"""The registry of strategies by name. To add a strategy, add a file in this folder and a line in `_BUILT_IN`.

Another package can add a strategy by an entry point of the group `instep.strategies` in its pyproject.toml:

    [project.entry-points."instep.strategies"]
    averaged = "my_package.strategies:AveragedGradients"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from instep.errors import SettingError, one_of
from instep.strategies.base import Strategy
from instep.utils.checks import wrong
from instep.utils.env import from_env, variable_of

_GROUP = "instep.strategies"


def _deepspeed(**options: Any) -> tuple[str, str, dict[str, Any]]:
    return "deepspeed", "DeepSpeedStrategy", options


# For each name: module and class of the strategy, and options for the class. A module is imported when needed.
_BUILT_IN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "single_device": ("base", "Strategy", {}),
    "ddp": ("ddp", "DDPStrategy", {}),
    "ddp_find_unused_parameters_true": ("ddp", "DDPStrategy", {"find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": ("ddp", "DDPStrategy", {"find_unused_parameters": False}),
    "dp": ("dp", "DataParallelStrategy", {}),
    "fsdp": ("fsdp", "FSDPStrategy", {}),
    "hsdp": ("fsdp", "FSDPStrategy", {"dp_replicate": "auto"}),
    "deepspeed": _deepspeed(),
    **{f"deepspeed_stage_{stage}": _deepspeed(stage=stage) for stage in range(4)},
    "deepspeed_stage_2_offload": _deepspeed(stage=2, offload_optimizer="cpu"),
    "deepspeed_stage_3_offload": _deepspeed(stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
    "deepspeed_stage_3_offload_nvme": _deepspeed(
        stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path="/local_nvme"
    ),
    "tp": ("mesh", "MeshStrategy", {"tp": -1, "dp_shard": 1}),
    "cp": ("mesh", "MeshStrategy", {"cp": -1, "dp_shard": 1}),
    "pp": ("mesh", "MeshStrategy", {"pp": -1, "dp_shard": 1}),
    "xla": ("xla", "XLAStrategy", {}),
    "xla_spmd": ("xla", "XLAStrategy", {"spmd": "data"}),
    "xla_fsdp": ("xla", "XLAStrategy", {"spmd": "fsdp"}),
}
_registered: dict[str, Callable[[], Strategy]] = {}


def register_strategy(name: str, factory: Callable[[], Strategy]) -> None:
    """Register a strategy under a name.

    Args:
        name: name for `Trainer(strategy=...)`.
        factory: function that makes a new strategy; usually the class.

    Raises:
        SettingError: a strategy with this name exists already.

    Example:
        >>> from instep.strategies import DDPStrategy
        >>> register_strategy("my_ddp", lambda: DDPStrategy(bucket_cap_mb=50))
    """
    if name.lower() in (*_BUILT_IN, "auto") or name in _registered:
        raise SettingError(f"a strategy named {name!r} is registered already; choose another name", field="name")
    _registered[name] = factory


def strategy_names() -> tuple[str, ...]:
    """Return all names for `Trainer(strategy=...)`: built-in ones, registered ones, then those of other packages.

    Example:
        >>> {"auto", "ddp", "fsdp"} <= set(strategy_names())
        True
    """
    return tuple(dict.fromkeys(["auto", *_BUILT_IN, *_registered, *(entry.name for entry in _entries())]))


def check_name(name: str, field: str = "strategy") -> str:
    """Check the name of a strategy, and return it as it is registered; built-in names may be given with capitals.

    Raises:
        SettingError: no strategy has this name; the message lists all names.
    """
    lower = name.lower()
    if lower == "auto" or lower in _BUILT_IN:
        return lower
    # `strategy_names` is called last, since it searches all installed packages.
    if name not in _registered and name not in strategy_names():
        raise one_of(field, name, strategy_names())
    return name


def asked_strategy() -> tuple[str, dict[str, Any]]:
    """Return the strategy's name and options from the variables INSTEP_STRATEGY and INSTEP_STRATEGY_OPTIONS.

    They are used by a program that does not choose a strategy.

    Raises:
        SettingError: the name is unknown, or there are options without a name.
    """
    name, options = from_env("strategy"), from_env("strategy_options") or {}
    if name is not None:
        name = check_name(name, variable_of("strategy"))
    elif options:
        raise SettingError(
            f"{variable_of('strategy_options')} has options of a strategy, but {variable_of('strategy')} names none",
            field="strategy_options",
            got=options,
        )
    return name or "auto", options


def resolve_strategy(
    strategy: str | Strategy, world_size: int, device_type: str = "cpu", options: Mapping[str, Any] | None = None
) -> Strategy:
    """Return the strategy for a name or a strategy object, as in `Trainer(strategy=...)`.

    Args:
        strategy: one of `strategy_names()`, or a strategy object, which is returned unchanged. "auto" means "xla" on an
            XLA device, else "single_device" with one process and "ddp" with more.
        world_size: number of processes.
        device_type: type of the processes' devices, such as "cuda".
        options: further arguments for the strategy, if it is given by name.

    Returns:
        The strategy.

    Raises:
        SettingError: the name is unknown, the strategy does not have one of the options, options are given with a
            strategy object, or the strategy cannot run with this number of processes.

    Example:
        >>> resolve_strategy("auto", world_size=4).name
        'ddp'
        >>> resolve_strategy("fsdp", world_size=4, options={"cpu_offload": True}).cpu_offload
        True
    """
    if isinstance(strategy, str):
        strategy = check_name(strategy)
    if strategy == "auto":
        strategy = "xla" if device_type == "xla" else "ddp" if world_size > 1 else "single_device"
    if isinstance(strategy, str):
        strategy = _make(strategy, options or {})
    elif options:
        raise SettingError(
            f"the options {', '.join(options)} come beside strategy={strategy!r}: give them to the strategy itself",
            field="strategy",
            got=strategy,
        )
    if not isinstance(strategy, Strategy):
        raise wrong("strategy", strategy, f"a name ({', '.join(strategy_names())}) or an instep.Strategy")
    strategy.check_world_size(world_size)
    return strategy


def _make(name: str, options: Mapping[str, Any]) -> Any:
    factory = _factory(name)
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise SettingError(
            f"strategy={name!r} cannot take the options {', '.join(options)}: {error}", field="strategy", got=name
        ) from error
    return factory(**options)


def _factory(name: str) -> Callable[..., Any]:
    if name in _BUILT_IN:
        file, kind, options = _BUILT_IN[name]
        return partial(getattr(import_module(f"instep.strategies.{file}"), kind), **options)
    if name in _registered:
        return _registered[name]
    found = [entry for entry in _entries() if entry.name == name]
    if len({entry.value for entry in found}) > 1:
        there = " and ".join(f"{entry.value} (of {entry.dist.name if entry.dist else '?'})" for entry in found)
        raise SettingError(
            f"strategy={name!r} is the name of several installed strategies: {there}. Import the one that is meant and "
            "pass an object.",
            field="strategy",
            got=name,
        )
    return found[0].load()


def _entries() -> list[EntryPoint]:
    return list(entry_points(group=_GROUP))
