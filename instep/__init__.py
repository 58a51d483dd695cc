"""instep: a trainer framework for PyTorch.

Importing this package is fast, since it does not import torch: each public name is imported when it is first used.

Example:
    >>> from instep import Trainer, TrainModule
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Accelerator": "instep.accelerator",
    "AcceleratorState": "instep.state",
    "Callback": "instep.callbacks",
    "DataModule": "instep.data",
    "GradientState": "instep.state",
    "Logger": "instep.loggers",
    "PartialState": "instep.state",
    "Resume": "instep.checkpoint.resume",
    "Strategy": "instep.strategies",
    "TrainModule": "instep.trainer",
    "Trainer": "instep.trainer",
    "Tuner": "instep.tuner",
    "debug_launcher": "instep.launchers.notebook",
    "init_empty_weights": "instep.big_models",
    "load_checkpoint_and_dispatch": "instep.big_models",
    "notebook_launcher": "instep.launchers.notebook",
    "seed_everything": "instep.utils.seed",
}

if TYPE_CHECKING:
    from instep.accelerator import Accelerator as Accelerator
    from instep.big_models import init_empty_weights as init_empty_weights
    from instep.big_models import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from instep.callbacks import Callback as Callback
    from instep.checkpoint.resume import Resume as Resume
    from instep.data import DataModule as DataModule
    from instep.launchers.notebook import debug_launcher as debug_launcher
    from instep.launchers.notebook import notebook_launcher as notebook_launcher
    from instep.loggers import Logger as Logger
    from instep.state import AcceleratorState as AcceleratorState
    from instep.state import GradientState as GradientState
    from instep.state import PartialState as PartialState
    from instep.strategies import Strategy as Strategy
    from instep.trainer import Trainer as Trainer
    from instep.trainer import TrainModule as TrainModule
    from instep.tuner import Tuner as Tuner
    from instep.utils.seed import seed_everything as seed_everything

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        # For `from instep import utils`, Python first asks for an attribute. After an AttributeError, Python imports
        # the submodule.
        if find_spec(f"instep.{name}") is not None:
            raise AttributeError(name)
        from instep.utils.porting import no_such_name  # imported late: needed only for an error

        raise no_such_name("instep", name)
    from instep.utils.imports import without_collections  # imported late: `import instep` must be fast

    with without_collections():
        value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
