"""The `instep` command, with one file for each sub-command, and `TrainerCLI` for command lines of your programs."""

from typing import TYPE_CHECKING

from instep.utils.imports import loads

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

__all__, __getattr__, __dir__ = loads(__name__)
