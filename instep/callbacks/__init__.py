"""Callbacks: one file each over `Callback`. A name is loaded when it is first used."""

from typing import TYPE_CHECKING

from instep.callbacks.base import Callback
from instep.utils.imports import loads

_HOME = {
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "ProgressBar": "progress",
    "ReplicaCheck": "replica_check",
    "Timer": "timer",
    "summarize": "model_summary",
}

if TYPE_CHECKING:
    from instep.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from instep.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from instep.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from instep.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from instep.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from instep.callbacks.model_summary import ModelSummary as ModelSummary
    from instep.callbacks.model_summary import summarize as summarize
    from instep.callbacks.progress import ProgressBar as ProgressBar
    from instep.callbacks.replica_check import ReplicaCheck as ReplicaCheck
    from instep.callbacks.timer import Timer as Timer

__all__ = ["Callback", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
