"""`TrainModule`, `Trainer` and the loop."""

from instep.trainer.module import TrainModule
from instep.trainer.trainer import Trainer

__all__ = ["TrainModule", "Trainer"]
