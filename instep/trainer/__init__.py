"""The `Trainer`, the `TrainModule` that it trains, and the states of a run."""

from instep.trainer.context import RunningStage, TrainerFn, TrainerState, TrainerStatus
from instep.trainer.module import TrainModule
from instep.trainer.trainer import Trainer

__all__ = ["RunningStage", "TrainModule", "Trainer", "TrainerFn", "TrainerState", "TrainerStatus"]
