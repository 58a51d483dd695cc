"""What users may import. A change here is a change of the interface: it belongs in the changelog."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import instep
from tests.helpers.spawn import HANG_S

PUBLIC = {
    "instep": [
        "Accelerator",
        "AcceleratorState",
        "Callback",
        "DataModule",
        "GradientState",
        "Logger",
        "PartialState",
        "Resume",
        "Strategy",
        "TrainModule",
        "Trainer",
        "Tuner",
        "__version__",
        "debug_launcher",
        "init_empty_weights",
        "load_checkpoint_and_dispatch",
        "notebook_launcher",
        "seed_everything",
    ],
    "instep.big_models": [
        "AlignDevicesHook",
        "BnbQuantizationConfig",
        "CpuOffload",
        "LayerwiseCastingHook",
        "ModelHook",
        "SequentialHook",
        "TorchAoConfig",
        "UserCpuOffloadHook",
        "add_hook_to_module",
        "align_module_device",
        "attach_align_device_hook",
        "attach_layerwise_casting_hooks",
        "check_device_map",
        "clean_device_map",
        "compute_module_sizes",
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "dtype_byte_size",
        "find_tied_parameters",
        "get_balanced_memory",
        "get_max_memory",
        "has_offloaded_params",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
        "load_and_quantize_model",
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
        "named_module_tensors",
        "prepare_offloaded_training",
        "prepare_pippy",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
        "retie_parameters",
        "set_module_tensor_to_device",
    ],
    "instep.callbacks": [
        "BackboneFinetuning",
        "BaseFinetuning",
        "BasePredictionWriter",
        "BatchSizeFinder",
        "Callback",
        "DeviceStatsMonitor",
        "EMAWeightAveraging",
        "EarlyStopping",
        "EarlyStoppingReason",
        "GradientAccumulationScheduler",
        "GradientMonitor",
        "ImageSampler",
        "LRFinder",
        "LambdaCallback",
        "LearningRateFinder",
        "LearningRateMonitor",
        "LiveProgressBar",
        "ModelCheckpoint",
        "ModelPruning",
        "ModelSummary",
        "OnExceptionCheckpoint",
        "OptunaPruning",
        "PredictionWriter",
        "ProgressBar",
        "QuantizationAwareTraining",
        "RayReport",
        "ReplicaCheck",
        "RichModelSummary",
        "RichProgressBar",
        "RichProgressBarTheme",
        "SpikeDetection",
        "StochasticWeightAveraging",
        "TQDMProgressBar",
        "ThroughputMonitor",
        "Timer",
        "WandbSweep",
        "WeightAveraging",
        "summarize",
    ],
    "instep.accelerator": [
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
    ],
    "instep.checkpoint": [
        "BackgroundSaver",
        "CheckpointInfo",
        "CheckpointStore",
        "FileRecord",
        "KeepAll",
        "KeepAny",
        "KeepBest",
        "KeepEvery",
        "KeepNewest",
        "LocalFiles",
        "Manifest",
        "PendingSave",
        "Reader",
        "Resume",
        "ResumeReport",
        "Retention",
        "Saved",
        "Shard",
        "StoredTensor",
        "Writer",
        "decode",
        "encode",
        "find_checkpoint",
        "is_checkpoint",
        "load_weights",
        "merge",
        "merge_in_parts",
        "read_tensors",
        "stored_weights",
        "write_tensors",
    ],
    "instep.cli": [
        "ArgsType",
        "LRSchedulerCallable",
        "LRSchedulerOptions",
        "LRSchedulerTypeTuple",
        "OptimizerCallable",
        "SaveConfigCallback",
        "TrainerArgumentParser",
        "TrainerCLI",
        "instantiate_class",
    ],
    "instep.compat": ["accelerate", "fabric", "lightning"],
    "instep.data": [
        "BatchSource",
        "CombinedLoader",
        "DataLoaderConfiguration",
        "DataModule",
        "LengthBucketBatchSampler",
        "MixtureSampler",
        "PackedDataset",
        "PackedStream",
        "PreparedLoader",
        "ShardedBatchSampler",
        "ShardedBatches",
        "StreamDataset",
        "StreamMixture",
        "prepare_loader",
        "resolve_limit",
        "tune_loader",
    ],
    "instep.distributed": [
        "ReplicaDifference",
        "Trigger",
        "Triggers",
        "all_reduce_",
        "broadcast",
        "broadcast_object",
        "broadcast_object_list",
        "compare_replicas",
        "concatenate",
        "control_group",
        "convert_to_fp32",
        "find_batch_size",
        "find_device",
        "gather",
        "gather_object",
        "gather_ragged",
        "listify",
        "pad_across_processes",
        "pad_input_tensors",
        "raise_together",
        "recursively_apply",
        "reduce",
        "send_to_device",
        "slice_tensors",
        "wait_for_everyone",
    ],
    "instep.profilers": [
        "AdvancedProfiler",
        "PassThroughProfiler",
        "Profiler",
        "PyTorchProfiler",
        "RunSummary",
        "SimpleProfiler",
    ],
    "instep.state": [
        "AcceleratorState",
        "DEVICE_KINDS",
        "DeviceKind",
        "DistributedType",
        "GradientRecord",
        "GradientState",
        "PartialState",
        "ProcessEnvironment",
        "Run",
        "active_run",
        "find_device_kind",
        "pop_run",
        "push_run",
        "read_environment",
    ],
    "instep.loggers": [
        "AimLogger",
        "CSVLogger",
        "ClearMLLogger",
        "CometLogger",
        "DVCLiveLogger",
        "JSONLinesLogger",
        "Logger",
        "MLFlowLogger",
        "SwanLabLogger",
        "TensorBoardLogger",
        "TrackioLogger",
        "WandbLogger",
        "register_logger",
    ],
    "instep.strategies": [
        "DDPStrategy",
        "DataParallelStrategy",
        "DeepSpeedStrategy",
        "FSDPStrategy",
        "Gradients",
        "MeshStrategy",
        "PRECISIONS",
        "Precision",
        "Strategy",
        "XLAStrategy",
        "register_strategy",
        "resolve_strategy",
        "sequence_positions",
        "strategy_names",
    ],
    "instep.testing": [
        "ContractError",
        "check_callback",
        "check_datamodule",
        "check_logger",
        "check_module",
        "check_strategy",
    ],
    "instep.trainer": ["RunningStage", "TrainModule", "Trainer", "TrainerFn", "TrainerState", "TrainerStatus"],
    "instep.utils": [
        "AttributeDict",
        "HyperParameters",
        "rank_zero_debug",
        "rank_zero_deprecation",
        "rank_zero_info",
        "rank_zero_only",
        "rank_zero_warn",
        "seed_everything",
    ],
    "instep.utils.rank_zero": [
        "rank_zero_debug",
        "rank_zero_deprecation",
        "rank_zero_info",
        "rank_zero_only",
        "rank_zero_warn",
    ],
    "instep.errors": [
        "CheckpointError",
        "CheckpointNotFoundError",
        "CorruptCheckpointError",
        "DataError",
        "DistributedError",
        "FolderInUseError",
        "HookError",
        "InstepError",
        "LeaseLostError",
        "LoaderWorkerError",
        "LogError",
        "MissingPackageError",
        "NonFiniteError",
        "NotTensorError",
        "Preempted",
        "RemoteError",
        "SettingError",
        "ShapeMismatchError",
        "StateError",
        "TrainingSpikeError",
        "UnsavableStateError",
        "UsageError",
    ],
    "instep.activations": ["ActivationCheckpointing"],
    "instep.pretrained": ["PretrainedExport"],
    "instep.optim": ["WholeMatrix", "biases_and_norms", "layerwise_lr", "param_groups"],
    "instep.losses": ["linear_cross_entropy"],
    "instep.schedules": [
        "SCHEDULES",
        "Schedule",
        "constant",
        "cosine",
        "inverse_sqrt",
        "linear",
        "make",
        "one_cycle",
        "wsd",
    ],
    "instep.units": ["CountedSchedule", "Samples", "Tokens", "by_samples", "by_tokens"],
    "instep.runs": ["Curve", "Label", "Metrics", "MetricsReader", "Run", "RunStatus", "find_runs"],
}

FILES = {"errors", "losses", "schedules"}  # rooms of one file
INTERNAL = ("config", "dashboard", "health", "launch", "launchers", "streams", "sweeps")
LAZY = ("big_models", "callbacks", "cli", "data", "loggers", "profilers", "strategies")


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", [name for name in PUBLIC if name != "instep.errors"])
def test_public_names_are_pinned(package):
    assert sorted(import_module(package).__all__) == PUBLIC[package]


def test_every_room_says_what_is_public():
    """A name is public where the `__all__` of a package's face has it, or a public module's docstring says so."""
    rooms = {path.parent.name for path in Path(instep.__file__).parent.glob("*/__init__.py")}
    assert rooms == {name.split(".")[1] for name in PUBLIC if "." in name} - FILES | set(INTERNAL)
    assert all(import_module(f"instep.{room}").__all__ == [] for room in INTERNAL)


def test_error_classes_are_pinned():
    module = import_module("instep.errors")
    classes = [
        name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module.__name__
    ]
    assert sorted(classes) == PUBLIC["instep.errors"]


@pytest.mark.parametrize("package", list(PUBLIC))
def test_every_public_name_loads(package):
    module = import_module(package)
    for name in PUBLIC[package]:
        assert getattr(module, name) is not None


def test_import_loads_no_torch():
    loaded = json.loads(in_new_process("import instep, json, sys; dir(instep); print(json.dumps(sorted(sys.modules)))"))
    assert not {"torch", "numpy"} & set(loaded)
    assert [name for name in loaded if name.startswith("instep")] == ["instep"]


def test_heavy_packages_load_on_use():
    code = """
import gc, json, sys, torch
gc.disable()
before = len(gc.get_objects())
from instep import Trainer, TrainModule
print(json.dumps([len(gc.get_objects()) - before, sorted(sys.modules)]))
"""
    objects, loaded = json.loads(in_new_process(code))
    heavy = {"tensorboard", "wandb", "rich", "deepspeed", "lightning_utilities", "torch.distributed.checkpoint"}
    assert not heavy & set(loaded)
    # The more an import makes, the sooner Python's full collection comes: 60 ms with torch's 350,000 objects.
    most = 12_500 if sys.version_info >= (3, 11) else 13_000  # Python 3.10 has a dict for each object
    assert objects < most, "load what only a run needs when it runs; benchmarks/import_time.py has the bar in seconds"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = instep.Trainor


@pytest.mark.parametrize("package", ["instep", *(f"instep.{it}" for it in LAZY)])
def test_names_are_listed(package):
    assert dir(import_module(package)) == PUBLIC[package]
