"""The `instep` command: one file for each sub-command, loaded when it is called. And `TrainerCLI` for own programs."""

from typing import TYPE_CHECKING

from instep.utils.lazy import loads

_HOME = {
    "ArgsType": "trainer_cli",
    "LRSchedulerCallable": "trainer_cli",
    "LRSchedulerOptions": "trainer_cli",
    "OptimizerCallable": "trainer_cli",
    "SaveConfigCallback": "save_config",
    "TrainerArgumentParser": "trainer_parser",
    "TrainerCLI": "trainer_cli",
    "instantiate_class": "trainer_cli",
}

if TYPE_CHECKING:
    from instep.cli.save_config import SaveConfigCallback as SaveConfigCallback
    from instep.cli.trainer_cli import ArgsType as ArgsType
    from instep.cli.trainer_cli import LRSchedulerCallable as LRSchedulerCallable
    from instep.cli.trainer_cli import LRSchedulerOptions as LRSchedulerOptions
    from instep.cli.trainer_cli import OptimizerCallable as OptimizerCallable
    from instep.cli.trainer_cli import TrainerCLI as TrainerCLI
    from instep.cli.trainer_cli import instantiate_class as instantiate_class
    from instep.cli.trainer_parser import TrainerArgumentParser as TrainerArgumentParser

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = loads(__name__, _HOME)
