"""Strategies: how a module is spread over processes and devices.

Each strategy's class is imported when it is first used, since most programs need only one. README.md in this folder
lists the files in reading order, the invariants, and what can fail.
"""

from typing import TYPE_CHECKING

from instep.strategies.base import Strategy
from instep.strategies.gradients import Gradients
from instep.strategies.precision import PRECISIONS, Precision
from instep.strategies.registry import register_strategy, resolve_strategy, strategy_names
from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.strategies.context_parallel import sequence_positions as sequence_positions
    from instep.strategies.ddp import DDPStrategy as DDPStrategy
    from instep.strategies.deepspeed import DeepSpeedStrategy as DeepSpeedStrategy
    from instep.strategies.dp import DataParallelStrategy as DataParallelStrategy
    from instep.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from instep.strategies.mesh import MeshStrategy as MeshStrategy
    from instep.strategies.xla import XLAStrategy as XLAStrategy

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

_, __getattr__, __dir__ = loads(__name__)
