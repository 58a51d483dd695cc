"""Strategies: how a module is spread over processes and devices.

A strategy's class is loaded when it is first used: most programs need one of them. README.md in this folder lists the
files in reading order, the invariants, and what can fail.
"""

from typing import TYPE_CHECKING

from instep.strategies.base import Strategy
from instep.strategies.gradients import Gradients
from instep.strategies.precision import PRECISIONS, Precision
from instep.strategies.registry import register_strategy, resolve_strategy, strategy_names
from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.strategies.context_parallel import sequence_positions
    from instep.strategies.ddp import DDPStrategy
    from instep.strategies.deepspeed import DeepSpeedStrategy
    from instep.strategies.dp import DataParallelStrategy
    from instep.strategies.fsdp import FSDPStrategy
    from instep.strategies.mesh import MeshStrategy
    from instep.strategies.xla import XLAStrategy

_HOME = {
    "sequence_positions": "context_parallel",
    "DDPStrategy": "ddp",
    "DataParallelStrategy": "dp",
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp",
    "MeshStrategy": "mesh",
    "XLAStrategy": "xla",
}

__all__ = [
    "PRECISIONS",
    "DDPStrategy",
    "DataParallelStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "Gradients",
    "MeshStrategy",
    "Precision",
    "Strategy",
    "XLAStrategy",
    "register_strategy",
    "resolve_strategy",
    "sequence_positions",
    "strategy_names",
]

__getattr__, __dir__ = loads(__name__, _HOME)
