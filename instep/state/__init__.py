"""State of this process, of the active run of a Trainer or Accelerator, and of the run's gradients.

`PartialState` describes the process. It is set once, from the launcher's environment. `AcceleratorState` and
`GradientState` are views of the active run, which a Trainer or an Accelerator pushes and pops. No package above this
one reads RANK or WORLD_SIZE.
"""

from instep.state.device import KINDS as DEVICE_KINDS
from instep.state.device import DeviceKind, DistributedType, find_device_kind
from instep.state.environment import ProcessEnvironment
from instep.state.launchers import read_environment
from instep.state.partial import PartialState
from instep.state.runs import GradientRecord, Run, active_run, pop_run, push_run
from instep.state.views import AcceleratorState, GradientState

__all__ = [
    "DEVICE_KINDS",
    "AcceleratorState",
    "DeviceKind",
    "DistributedType",
    "GradientRecord",
    "GradientState",
    "PartialState",
    "ProcessEnvironment",
    "Run",
    "active_run",
    "find_device_kind",
    "pop_run",
    "push_run",
    "read_environment",
]
