"""How a module is spread over processes and devices."""

from instep.strategies.base import Strategy
from instep.strategies.ddp import DDPStrategy
from instep.strategies.precision import PRECISIONS, Precision
from instep.strategies.registry import register_strategy, resolve_strategy, strategy_names

__all__ = [
    "PRECISIONS",
    "DDPStrategy",
    "Precision",
    "Strategy",
    "register_strategy",
    "resolve_strategy",
    "strategy_names",
]
