"""`Accelerator`: the Trainer's strategies, data, loggers and checkpoints for a handwritten loop."""

from typing import TYPE_CHECKING

from instep.accelerator.accelerator import Accelerator
from instep.accelerator.compiling import TorchDynamoPlugin
from instep.accelerator.exporting import save
from instep.accelerator.handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from instep.accelerator.loader import skip_first_batches
from instep.accelerator.logging import get_logger, tqdm
from instep.accelerator.memory import clear_device_cache, find_executable_batch_size, release_memory
from instep.accelerator.parallelism import ParallelismConfig
from instep.accelerator.rng import set_seed, synchronize_rng_states
from instep.accelerator.trackers import GeneralTracker, LoggerType, register_tracker_class
from instep.accelerator.unwrapping import convert_outputs_to_fp32, extract_model_from_parallel
from instep.data import DataLoaderConfiguration
from instep.utils.imports import loads

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LocalSGD",
    "LoggerType",
    "ParallelismConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "clear_device_cache",
    "convert_outputs_to_fp32",
    "extract_model_from_parallel",
    "find_executable_batch_size",
    "get_logger",
    "register_tracker_class",
    "release_memory",
    "save",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "tqdm",
]

if TYPE_CHECKING:
    from instep.accelerator.local_sgd import LocalSGD as LocalSGD

_, __getattr__, __dir__ = loads(__name__)
