"""What names of Lightning and Accelerate become, and what to do about those that have no counterpart.

Names are canonical here: `lightning.callbacks.Timer` for what Lightning offers as `lightning.pytorch.callbacks.Timer`,
`pytorch_lightning.callbacks.timer.Timer` and so on. A class or function is looked up by its last word.
"""

from __future__ import annotations

_LIGHTNING_ROOTS = ("lightning.pytorch", "pytorch_lightning", "lightning")
_FABRIC_ROOTS = ("lightning.fabric", "lightning_fabric")
_RANK_ZERO = {
    name: f"instep.utils.rank_zero.{name}"
    for name in ("rank_zero_debug", "rank_zero_info", "rank_zero_only", "rank_zero_warn")
}

MODULES = {
    "lightning": "instep",
    "lightning.callbacks": "instep.callbacks",
    "lightning.loggers": "instep.loggers",
    "lightning.strategies": "instep.strategies",
    "accelerate": "instep",
}

MOVED = {
    "lightning": {
        "LightningModule": "instep.TrainModule",
        "LightningDataModule": "instep.DataModule",
        "Trainer": "instep.Trainer",
        "seed_everything": "instep.seed_everything",
        **{
            name: f"instep.callbacks.{name}"
            for name in (
                "Callback", "EarlyStopping", "LambdaCallback", "LearningRateMonitor", "ModelCheckpoint",
                "ModelSummary", "Timer",
            )
        },
        "RichModelSummary": "instep.callbacks.ModelSummary",
        "TQDMProgressBar": "instep.callbacks.ProgressBar",
        "RichProgressBar": "instep.callbacks.ProgressBar",
        **{name: f"instep.loggers.{name}" for name in ("CSVLogger", "Logger", "TensorBoardLogger", "WandbLogger")},
        **{
            name: f"instep.strategies.{name}"
            for name in ("DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "Strategy", "XLAStrategy")
        },
        "CombinedLoader": "instep.data.CombinedLoader",
        "LightningCLI": "instep.cli.TrainerCLI",
        **_RANK_ZERO,
        **dict.fromkeys(
            ("STEP_OUTPUT", "OptimizerLRScheduler", "TRAIN_DATALOADERS", "EVAL_DATALOADERS", "LRSchedulerTypeUnion"),
            "typing.Any",
        ),
    },
    "fabric": {"seed_everything": "instep.seed_everything", **_RANK_ZERO},
    "accelerate": {
        **{
            name: f"instep.{name}"
            for name in (
                "Accelerator", "AcceleratorState", "GradientState", "PartialState", "debug_launcher",
                "notebook_launcher",
            )
        },
        "DistributedType": "instep.state.DistributedType",
        **{
            name: f"instep.accelerator.{name}"
            for name in (
                "AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs", "GradScalerKwargs",
                "GradientAccumulationPlugin", "InitProcessGroupKwargs", "LocalSGD", "ProfileKwargs",
                "ProjectConfiguration", "clear_device_cache", "find_executable_batch_size", "get_logger",
                "release_memory", "set_seed", "skip_first_batches", "synchronize_rng_states", "tqdm",
            )
        },
        **{
            name: f"instep.distributed.{name}"
            for name in (
                "broadcast", "broadcast_object_list", "concatenate", "find_batch_size", "gather", "gather_object",
                "pad_across_processes", "reduce", "send_to_device", "slice_tensors", "wait_for_everyone",
            )
        },
    },
}  # fmt: skip

_BY_ITSELF = "leave it out: the launcher's environment is read by itself"
_NO_BIG_MODELS = "keep Accelerate for it: instep has nothing in its place"
_OWN_CALLBACK = "write it as a Callback of your own"
_OWN_LOGGER = "write it as a Logger of your own: a subclass of instep.Logger with `_log_metrics`"

ADVICE = {
    "Tuner": "try learning rates in a loop of short fits; global_batch_size=... keeps the meaning of a batch",
    "StochasticWeightAveraging": f"torch.optim.swa_utils has the averaging; {_OWN_CALLBACK}",
    "WeightAveraging": f"torch.optim.swa_utils has the averaging; {_OWN_CALLBACK}",
    "EMAWeightAveraging": f"torch.optim.swa_utils has the averaging; {_OWN_CALLBACK}",
    "OnExceptionCheckpoint": "use ModelCheckpoint(save_on_exception=True)",
    "MisconfigurationException": "instep raises instep.errors.SettingError, a ValueError",
    "ModelParallelStrategy": "use instep.strategies.MeshStrategy(dp_shard=, tp=), with the module's `parallelize`",
    "SingleDeviceStrategy": 'use strategy="single_device"',
    "SLURMEnvironment": _BY_ITSELF,
    "LightningEnvironment": _BY_ITSELF,
    "TorchElasticEnvironment": _BY_ITSELF,
    "MPIEnvironment": _BY_ITSELF,
    "Fabric": "instep.Accelerator is for handwritten loops; what its methods do stands in docs/accelerator.md",
    "FullyShardedDataParallelPlugin": "use Accelerator(strategy=instep.strategies.FSDPStrategy(...))",
    "DeepSpeedPlugin": 'use Trainer(strategy="deepspeed_stage_2"), or Accelerator(strategy="fsdp")',
    "TorchDynamoPlugin": "compile the model with torch.compile(model) before prepare()",
    "MegatronLMPlugin": "use Trainer(strategy=instep.strategies.MeshStrategy(tp=, pp=))",
    "ParallelismConfig": "use Trainer(strategy=instep.strategies.MeshStrategy(dp_replicate=, dp_shard=, tp=, cp=))",
    **dict.fromkeys(("MLFlowLogger", "CometLogger", "NeptuneLogger", "LitLogger", "GeneralTracker"), _OWN_LOGGER),
    **dict.fromkeys(
        (
            "BackboneFinetuning", "BaseFinetuning", "BasePredictionWriter", "BatchSizeFinder", "DeviceStatsMonitor",
            "GradientAccumulationScheduler", "LearningRateFinder", "ModelPruning", "SpikeDetection",
            "ThroughputMonitor",
        ),
        _OWN_CALLBACK,
    ),
    **dict.fromkeys(("SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler"), "use torch.profiler around fit"),
    **dict.fromkeys(
        (
            "init_empty_weights", "init_on_device", "infer_auto_device_map", "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model", "dispatch_model", "cpu_offload", "disk_offload", "prepare_pippy",
        ),
        _NO_BIG_MODELS,
    ),
    "DummyOptim": "give the optimizer itself",
    "DummyScheduler": "give the scheduler itself",
    "__version__": "instep counts its own",
    "Metric": "torchmetrics.Metric works as it is",
}  # fmt: skip
"""What to do about names that have no counterpart; others are only named."""

NOT_A_BASE = {
    "Logger": "its hooks are other ones: `_log_metrics`, `_log_hyperparams`, `_start`, `_finalize`",
    "Strategy": "its methods are other ones: see instep/strategies/base.py",
    "ProgressBar": "it draws by itself; override `get_metrics` to show other values",
}
"""Classes that keep their place when used, but not when subclassed: by instep's name."""

RENAMED = {
    "Trainer": {
        "num_processes": "devices",
        "replace_sampler_ddp": "use_distributed_sampler",
        "checkpoint_callback": "enable_checkpointing",
        "gpus": "devices",
        "tpu_cores": "devices",
    },
    "Trainer.fit": {"train_dataloader": "train_dataloaders", "val_dataloader": "val_dataloaders"},
    "Trainer.validate": {"val_dataloaders": "dataloaders"},
    "Trainer.test": {"test_dataloaders": "dataloaders"},
}
"""Arguments that have another name, by class or method."""

ADDED = {("Trainer", "gpus"): 'accelerator="gpu"', ("Trainer", "tpu_cores"): 'accelerator="xla"'}
"""What an argument that was renamed also said."""

DROPPED = {
    "Trainer": {
        "enable_autolog_hparams": "save_hyperparameters(logger=False) keeps them out of the loggers",
        "suggest_integrations": "nothing is suggested",
    },
    **{
        method: {"weights_only": "loading a checkpoint never runs code"}
        for method in (
            "Trainer.fit", "Trainer.validate", "Trainer.test", "Trainer.predict", "TrainModule.load_from_checkpoint",
        )
    },
    "seed_everything": {"verbose": "nothing is printed"},
    "ProgressBar": {
        "refresh_rate": "it draws some times a second",
        "process_position": "there is one bar",
    },
    "TensorBoardLogger": {"default_hp_metric": "there is no placeholder metric"},
    "Accelerator.save_state": {"safe_serialization": "states are always safetensors"},
    "Accelerator.save_model": {
        "safe_serialization": "it always is safetensors",
        "max_shard_size": "it is one file",
    },
    "Accelerator": {"use_seedable_sampler": "the order always is a function of seed and epoch"},
    "DataLoaderConfiguration": {"use_seedable_sampler": "the order always is a function of seed and epoch"},
}  # fmt: skip
"""Arguments that say what is so anyway, and why."""

REFUSED = {
    (
        "WandbLogger",
        "log_model",
    ): "log the checkpoint's folder as an artifact, in `after_save_checkpoint` of a subclass",
    ("WandbLogger", "add_file_policy"): "there is none, since models are not uploaded",
    ("WandbLogger", "checkpoint_name"): "there is none, since models are not uploaded",
}
"""Arguments that would be passed on to something that does not know them."""

INTO_DATALOADER_CONFIG = ("split_batches", "dispatch_batches", "even_batches")
"""Arguments of Accelerator that are in its `dataloader_config`."""

VALUES = {
    ("Trainer", "accelerator"): {"tpu": "xla"},
    ("Trainer", "strategy"): {
        "ddp_spawn": "ddp",
        "ddp_fork": "ddp",
        "ddp_notebook": "ddp",
        "fsdp_native": "fsdp",
        "single_tpu": "xla",
        "single_xla": "xla",
    },
    ("Trainer", "precision"): {"transformer-engine": "fp8", "transformer-engine-float16": "fp8"},
}
"""Texts that have another name, by class and argument."""

POSITIONAL = {
    "TensorBoardLogger": 3,
    "WandbLogger": 4,
    "ProgressBar": 0,
    "Trainer": 0,
    "Accelerator": 0,
    "DDPStrategy": 0,
    "DeepSpeedStrategy": 0,
    "FSDPStrategy": 0,
    "XLAStrategy": 0,
    "DataLoaderConfiguration": 3,
    "DistributedDataParallelKwargs": 0,
    "InitProcessGroupKwargs": 1,
    "reduce": 2,
    "send_to_device": 3,
}
"""How many arguments without a name mean the same, where not all of them do."""

ATTRIBUTES_RENAMED = {("Trainer", "lightning_module"): "model"}

_IN_CONFIG = "it is in `accelerator.dataloader_config`"
_SHORT_FITS = "try learning rates in a loop of short fits"
_WHERE = "`trainer.current_epoch` and `trainer.global_step` say where a run stands"

ATTRIBUTES = {
    "Accelerator": {
        "use_distributed": "ask `accelerator.num_processes > 1`",
        "multi_device": "ask `accelerator.num_processes > 1`",
        "trackers": "`accelerator.get_tracker(name)` gives one",
        "scaler": "`accelerator.optimizer_step_was_skipped` says whether a step was left out",
        "save_iteration": "states are numbered by `accelerator.step`",
        "trigger_sync_in_backward": "use `accumulate`, or `no_sync` where gradients wait",
        "native_amp": "ask `accelerator.mixed_precision`",
        **dict.fromkeys(("split_batches", "dispatch_batches", "even_batches", "non_blocking"), _IN_CONFIG),
    },
    "Trainer": {
        "add_argparse_args": "declare the arguments that the script takes, or use instep.cli.TrainerCLI",
        "from_argparse_args": "call Trainer(...) with the arguments, or use instep.cli.TrainerCLI",
        "checkpoint_callbacks": "`trainer.checkpoint_callback` is the first; the others are in `trainer.callbacks`",
        "early_stopping_callbacks": "they are in `trainer.callbacks`",
        "progress_bar_callback": "it is in `trainer.callbacks`",
        "device_ids": "`trainer.num_devices` is their number",
        "precision_plugin": "`trainer.precision` is its name",
        "scaler": "the strategy owns it",
        "received_sigterm": "a signal saves and stops the run by itself",
        "init_module": "build large layers in `configure_model`",
        **dict.fromkeys(("tune", "tuner", "lr_find"), _SHORT_FITS),
        **dict.fromkeys(("fit_loop", "validate_loop", "test_loop", "predict_loop", "is_last_batch"), _WHERE),
        **dict.fromkeys(
            ("val_dataloaders", "test_dataloaders", "predict_dataloaders"),
            "`trainer.datamodule` or the module has them",
        ),
    },
    "TrainModule": {
        "to_onnx": "torch.onnx.export(module, ...) does it",
        "to_torchscript": "torch.export or torch.jit do it",
        "to_tensorrt": "torch_tensorrt does it",
        "on_gpu": "`self.device.type` says it",
        "fabric": "there is none",
        "device_mesh": "`self.trainer.strategy` has the mesh",
        "configure_sharded_model": "use `configure_model`",
        "tbptt_split_batch": "cut sequences in the data set, or use manual optimization",
        "get_progress_bar_dict": "override ProgressBar.get_metrics",
        "on_epoch_start": "use `on_train_epoch_start`",
        "on_epoch_end": "use `on_train_epoch_end`",
    },
    "DataModule": {"load_from_checkpoint": "its state comes back with the Trainer's `ckpt_path`"},
    "Callback": {
        "on_epoch_start": "use `on_train_epoch_start`",
        "on_epoch_end": "use `on_train_epoch_end`",
        "on_batch_start": "use `on_train_batch_start`",
        "on_batch_end": "use `on_train_batch_end`",
        "on_pretrain_routine_start": "use `on_fit_start`",
        "on_init_start": "use `setup`",
        "on_init_end": "use `setup`",
    },
}
"""What to do about attributes and methods that are not there, by instep's class."""

STEP_ARGUMENTS = {
    "optimizer_idx": "several optimizers need manual optimization: self.automatic_optimization = False",
    "dataloader_iter": "iterate in a loop of your own, with instep.Accelerator",
    "hiddens": "cut sequences in the data set, or use manual optimization",
}
"""Parameters of step methods that nothing passes."""

ENVIRONMENT = {
    "PL_TRAINER_": "arguments of the Trainer are not read from the environment, but for what `instep env` lists",
    "ACCELERATE_": "it is not read; `instep env` lists what is",
}


def canonical(name: str) -> str | None:
    """A dotted name of Lightning or Accelerate in its one form; None for any other.

    Example:
        >>> canonical("pytorch_lightning.callbacks.Timer"), canonical("lightning.LightningModule"), canonical("torch")
        ('lightning.callbacks.Timer', 'lightning.LightningModule', None)
    """
    for roots, short in ((_FABRIC_ROOTS, "fabric"), (_LIGHTNING_ROOTS, "lightning"), (("accelerate",), "accelerate")):
        for root in roots:
            if name == root or name.startswith(f"{root}."):
                return short + name[len(root) :]
    return None


def successor(name: str) -> str | None:
    """Instep's dotted name for a canonical one; None where there is none.

    Example:
        >>> successor("lightning.callbacks.early_stopping.EarlyStopping")
        'instep.callbacks.EarlyStopping'
    """
    root, _, rest = name.partition(".")
    parents, _, leaf = rest.rpartition(".")
    return None if parents != parents.lower() else MOVED.get(root, {}).get(leaf)  # a class's attribute is not meant


def advice(name: str) -> str:
    """What to do about a canonical name that has no successor."""
    leaf = name.rpartition(".")[2]
    if name.startswith("fabric"):
        return ADVICE["Fabric"]
    if leaf.startswith("is_") and leaf.endswith("_available"):
        return "ask torch, or importlib.util.find_spec"
    return ADVICE.get(leaf, "instep has nothing of that name")
