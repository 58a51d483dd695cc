"""The `instep` command: one file for each sub-command, loaded when it is called. And `TrainerCLI` for own programs."""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

_HOME = {
    "ArgsType": "trainer_cli",
    "LRSchedulerCallable": "trainer_parser",
    "LRSchedulerOptions": "trainer_parser",
    "LRSchedulerTypeTuple": "trainer_parser",
    "OptimizerCallable": "trainer_parser",
    "SaveConfigCallback": "trainer_cli",
    "TrainerArgumentParser": "trainer_parser",
    "TrainerCLI": "trainer_cli",
    "instantiate_class": "trainer_parser",
}

if TYPE_CHECKING:
    from instep.cli.trainer_cli import ArgsType as ArgsType
    from instep.cli.trainer_cli import SaveConfigCallback as SaveConfigCallback
    from instep.cli.trainer_cli import TrainerCLI as TrainerCLI
    from instep.cli.trainer_parser import LRSchedulerCallable as LRSchedulerCallable
    from instep.cli.trainer_parser import LRSchedulerOptions as LRSchedulerOptions
    from instep.cli.trainer_parser import LRSchedulerTypeTuple as LRSchedulerTypeTuple
    from instep.cli.trainer_parser import OptimizerCallable as OptimizerCallable
    from instep.cli.trainer_parser import TrainerArgumentParser as TrainerArgumentParser
    from instep.cli.trainer_parser import instantiate_class as instantiate_class

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
