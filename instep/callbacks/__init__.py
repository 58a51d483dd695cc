"""The callbacks of instep, each in a file of its own; a file is imported when a name from it is first used."""

from typing import TYPE_CHECKING

from instep.callbacks.base import Callback
from instep.utils.imports import loads

if TYPE_CHECKING:
    from instep.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from instep.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from instep.callbacks.guests.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from instep.callbacks.guests.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from instep.callbacks.guests.finetuning import BackboneFinetuning as BackboneFinetuning
    from instep.callbacks.guests.finetuning import BaseFinetuning as BaseFinetuning
    from instep.callbacks.guests.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from instep.callbacks.guests.gradient_monitor import GradientMonitor as GradientMonitor
    from instep.callbacks.guests.image_sampler import ImageSampler as ImageSampler
    from instep.callbacks.guests.lambda_callback import LambdaCallback as LambdaCallback
    from instep.callbacks.guests.lr_finder import LearningRateFinder as LearningRateFinder
    from instep.callbacks.guests.lr_finder import LRFinder as LRFinder
    from instep.callbacks.guests.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from instep.callbacks.guests.optuna_pruning import OptunaPruning as OptunaPruning
    from instep.callbacks.guests.prediction_writer import BasePredictionWriter as BasePredictionWriter
    from instep.callbacks.guests.prediction_writer import PredictionWriter as PredictionWriter
    from instep.callbacks.guests.pruning import ModelPruning as ModelPruning
    from instep.callbacks.guests.quantization import QuantizationAwareTraining as QuantizationAwareTraining
    from instep.callbacks.guests.ray_report import RayReport as RayReport
    from instep.callbacks.guests.replica_check import ReplicaCheck as ReplicaCheck
    from instep.callbacks.guests.rich_progress import RichProgressBar as RichProgressBar
    from instep.callbacks.guests.rich_progress import RichProgressBarTheme as RichProgressBarTheme
    from instep.callbacks.guests.spike_detection import SpikeDetection as SpikeDetection
    from instep.callbacks.guests.stochastic_weight_avg import StochasticWeightAveraging as StochasticWeightAveraging
    from instep.callbacks.guests.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from instep.callbacks.guests.tqdm_progress import TQDMProgressBar as TQDMProgressBar
    from instep.callbacks.guests.wandb_sweep import WandbSweep as WandbSweep
    from instep.callbacks.guests.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from instep.callbacks.guests.weight_averaging import WeightAveraging as WeightAveraging
    from instep.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
    from instep.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from instep.callbacks.model_summary import ModelSummary as ModelSummary
    from instep.callbacks.model_summary import RichModelSummary as RichModelSummary
    from instep.callbacks.model_summary import summarize as summarize
    from instep.callbacks.progress import LiveProgressBar as LiveProgressBar
    from instep.callbacks.progress import ProgressBar as ProgressBar
    from instep.callbacks.timer import Timer as Timer

_names, __getattr__, __dir__ = loads(__name__)

__all__ = ["Callback", *_names]  # pyright: ignore[reportUnsupportedDunderAll]
