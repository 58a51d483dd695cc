"""Callbacks: one file each over `Callback`. A name is loaded when it is first used."""

from typing import TYPE_CHECKING

from instep.callbacks.base import Callback
from instep.utils.imports import loads

_HOME = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BatchSizeFinder": "batch_size_finder",
    "BasePredictionWriter": "prediction_writer",
    "DeviceStatsMonitor": "monitors.device_stats_monitor",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "EarlyStoppingReason": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation_scheduler",
    "GradientMonitor": "monitors.gradient_monitor",
    "ImageSampler": "image_sampler",
    "LRFinder": "lr_finder",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "monitors.lr_monitor",
    "LiveProgressBar": "progress",
    "ModelCheckpoint": "model_checkpoint",
    "ModelPruning": "pruning",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "OptunaPruning": "optuna_pruning",
    "PredictionWriter": "prediction_writer",
    "ProgressBar": "progress",
    "QuantizationAwareTraining": "quantization",
    "ReplicaCheck": "monitors.replica_check",
    "RichModelSummary": "model_summary",
    "RichProgressBar": "progress.rich_progress",
    "RichProgressBarTheme": "progress.rich_progress",
    "SpikeDetection": "monitors.spike_detection",
    "StochasticWeightAveraging": "stochastic_weight_avg",
    "TQDMProgressBar": "progress.tqdm_progress",
    "ThroughputMonitor": "monitors.throughput_monitor",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
    "summarize": "model_summary",
}

if TYPE_CHECKING:
    from instep.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from instep.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from instep.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from instep.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from instep.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from instep.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from instep.callbacks.image_sampler import ImageSampler as ImageSampler
    from instep.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from instep.callbacks.lr_finder import LearningRateFinder as LearningRateFinder
    from instep.callbacks.lr_finder import LRFinder as LRFinder
    from instep.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from instep.callbacks.model_summary import ModelSummary as ModelSummary
    from instep.callbacks.model_summary import RichModelSummary as RichModelSummary
    from instep.callbacks.model_summary import summarize as summarize
    from instep.callbacks.monitors.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from instep.callbacks.monitors.gradient_monitor import GradientMonitor as GradientMonitor
    from instep.callbacks.monitors.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from instep.callbacks.monitors.replica_check import ReplicaCheck as ReplicaCheck
    from instep.callbacks.monitors.spike_detection import SpikeDetection as SpikeDetection
    from instep.callbacks.monitors.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from instep.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from instep.callbacks.optuna_pruning import OptunaPruning as OptunaPruning
    from instep.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from instep.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from instep.callbacks.progress import LiveProgressBar as LiveProgressBar
    from instep.callbacks.progress import ProgressBar as ProgressBar
    from instep.callbacks.progress.rich_progress import RichProgressBar as RichProgressBar
    from instep.callbacks.progress.rich_progress import RichProgressBarTheme as RichProgressBarTheme
    from instep.callbacks.progress.tqdm_progress import TQDMProgressBar as TQDMProgressBar
    from instep.callbacks.pruning import ModelPruning as ModelPruning
    from instep.callbacks.quantization import QuantizationAwareTraining as QuantizationAwareTraining
    from instep.callbacks.stochastic_weight_avg import StochasticWeightAveraging as StochasticWeightAveraging
    from instep.callbacks.timer import Timer as Timer
    from instep.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from instep.callbacks.weight_averaging import WeightAveraging as WeightAveraging

__all__ = ["Callback", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = loads(__name__, _HOME)
