"""Tables of names in other packages (Lightning, Accelerate, torchrun, DeepSpeed) and of what replaces them in instep.

Error messages, `instep launch`, `instep config update` and `instep migrate` use these tables; entries that only
`instep migrate` needs are in `instep/compat/tables.py`. Names of modules and classes are in a canonical form:
`lightning.callbacks.Timer` stands for `lightning.pytorch.callbacks.Timer`, `pytorch_lightning.callbacks.timer.Timer`
and so on. A class or function is looked up by the last part of its dotted name.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

_LIGHTNING_ROOTS = ("lightning.pytorch", "pytorch_lightning", "lightning")
_FABRIC_ROOTS = ("lightning.fabric", "lightning_fabric")
FABRIC = ("CSVLogger", "Fabric", "TensorBoardLogger", "Throughput", "ThroughputMonitor", "is_wrapped", "measure_flops")
"""Names of Lightning Fabric that instep has under the same name in `instep.compat.fabric`."""

_ROOMS = {
    "lightning": ("callbacks", "loggers", "profilers", "strategies", "data", "cli", "trainer"),
    "fabric": ("strategies",),
    "accelerate": ("accelerator", "distributed", "big_models", "state"),
}
"""Other package -> packages of instep. A name that one of these and the other package have means the same in both."""
_RENAMED_CALLBACKS = {
    "PyTorchLightningPruningCallback": "OptunaPruning",
    "_LRFinder": "LRFinder",
    **dict.fromkeys(("TuneReportCallback", "TuneReportCheckpointCallback", "RayTrainReportCallback"), "RayReport"),
}
_BOTH = {
    "TrainingSpikeException": "instep.errors.TrainingSpikeError",
    "AttributeDict": "instep.utils.AttributeDict",
    "seed_everything": "instep.seed_everything",
    "move_data_to_device": "instep.distributed.send_to_device",
    **{
        name: f"instep.utils.rank_zero.{name}"
        for name in ("rank_zero_debug", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn")
    },
}
_MOVED = {
    "lightning": {
        **_BOTH,
        **{name: f"instep.callbacks.{ours}" for name, ours in _RENAMED_CALLBACKS.items()},
        "Fabric": "instep.compat.fabric.Fabric",
        "LightningModule": "instep.TrainModule",
        "LightningDataModule": "instep.DataModule",
        "Tuner": "instep.Tuner",
        "Trainer": "instep.Trainer",
        "Tqdm": "instep.callbacks.guests.tqdm_progress.Tqdm",
        "ParallelStrategy": "instep.strategies.Strategy",
        "HyperparametersMixin": "instep.utils.HyperParameters",
        "grad_norm": "instep.callbacks.guests.gradient_monitor.grad_norm",
        "isolate_rng": "instep.utils.seed.isolate_rng",
        "LightningCLI": "instep.cli.TrainerCLI",
        "LightningArgumentParser": "instep.cli.TrainerArgumentParser",
        **dict.fromkeys(
            (
                "STEP_OUTPUT", "OptimizerLRScheduler", "TRAIN_DATALOADERS", "EVAL_DATALOADERS", "LRSchedulerTypeUnion",
                "LRSchedulerConfigType", "OptimizerConfig", "OptimizerLRSchedulerConfig",
            ),
            "typing.Any",
        ),
        "get_torchvision_model": "torchvision.models.get_model",
    },
    "fabric": {**_BOTH, **{name: f"instep.compat.fabric.{name}" for name in FABRIC}},
    "accelerate": {
        **{
            name: f"instep.{name}"
            for name in (
                "Accelerator", "AcceleratorState", "GradientState", "PartialState", "debug_launcher",
                "notebook_launcher",
            )
        },
        "is_cuda_available": "torch.cuda.is_available",
        "is_xpu_available": "torch.xpu.is_available",
        "is_mps_available": "torch.backends.mps.is_available",
    },
}  # fmt: skip


@cache
def moved() -> dict[str, dict[str, str]]:
    """Return, for each of "lightning", "fabric" and "accelerate", a dict from its names to instep's dotted names.

    The packages in `_ROOMS` also have names that do not exist in the other package. Nobody looks these names up, so
    they do no harm; only `Precision` is left out, since Lightning's class of this name is something else, a plug-in.
    """
    found: dict[str, dict[str, str]] = {}
    for root, rooms in _ROOMS.items():
        names = [(room, name) for room in rooms for name in import_module(f"instep.{room}").__all__]
        found[root] = {name: f"instep.{room}.{name}" for room, name in names if name != "Precision"} | _MOVED[root]
    return found


_BY_ITSELF = "leave it out: the launcher's environment is read by itself"
_AVERAGING = "use instep.callbacks.EMAWeightAveraging or StochasticWeightAveraging"
_OWN_LOGGER = "write it as a Logger of your own: a subclass of instep.Logger with `_log_metrics`"

_INTERNAL = "it is an internal part of Lightning, without a counterpart: copy it, or do without"

PARTS_OF_LIGHTNING = {
    "environments": _BY_ITSELF,
    "collectives": "use torch.distributed, or instep.distributed",
    "io": "instep reads and writes checkpoints itself; `instep.checkpoint` reads them in other programs",
    "precision": "use precision=...",
    "plugins": "use precision=... and strategy=... of the Trainer or Accelerator; instep has no plug-in classes",
    "accelerators": 'use accelerator="cpu", "gpu" or "xla"',
    "strategies": "use strategy=... by name, or a class of instep.strategies",
    "loggers": "use a class of instep.loggers, or log_with=... of the Accelerator",
    "loops": "there are no loop objects: `trainer.current_epoch` and `trainer.global_step` say where a run stands",
    **dict.fromkeys(("connectors", "utilities", "overrides"), _INTERNAL),
}
"""Part of Lightning -> advice about its names that have no counterpart in instep."""

ADVICE = {
    **dict.fromkeys(
        ("CheckpointIO", "TorchCheckpointIO", "AsyncCheckpointIO", "_WrappingCheckpointIO"),
        PARTS_OF_LIGHTNING["io"] + "; ModelCheckpoint(background=True) saves beside the training",
    ),
    "get_filesystem": "use fsspec.core.url_to_fs(path)[0]",
    "reset_seed": "call instep.seed_everything(seed)",
    "_load": "use instep.checkpoint.load_weights, or torch.load for a file of torch's",
    **dict.fromkeys(("MixedPrecision", "MixedPrecisionPlugin"), "use precision='bf16-mixed' or '16-mixed'"),
    **dict.fromkeys(("HalfPrecision", "HalfPrecisionPlugin"), "use precision='bf16-true' or '16-true'"),
    "MegatronStrategy": "use Trainer(strategy=instep.strategies.MeshStrategy(tp=, pp=))",
    **dict.fromkeys(("SWA", "EMA"), _AVERAGING),
    "from_compiled": "use Trainer(compile='module'), or give it what torch.compile(module) returned",
    "to_uncompiled": "make the module anew and load its weights: a compiled one stays compiled",
    **dict.fromkeys(
        ("BatchesProcessedColumn", "CustomBarColumn", "CustomTimeColumn", "MetricsTextColumn", "ProcessingSpeedColumn"),
        "override RichProgressBar.configure_columns, and return rich's own columns there",
    ),
    "MisconfigurationException": "instep raises instep.errors.SettingError, a ValueError",
    "ModelParallelStrategy": "use instep.strategies.MeshStrategy(dp_shard=, tp=), with the module's `parallelize`",
    "SingleDeviceStrategy": 'use strategy="single_device"',
    **{
        f"{name}Tracker": f'use log_with="{kind}"'
        for name, kind in (
            ("Aim", "aim"), ("ClearML", "clearml"), ("CometML", "comet_ml"), ("DVCLive", "dvclive"),
            ("MLflow", "mlflow"), ("SwanLab", "swanlab"), ("TensorBoard", "tensorboard"), ("Trackio", "trackio"),
            ("WandB", "wandb"),
        )
    },
    **dict.fromkeys(
        ("ClusterEnvironment", "LightningEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
        _BY_ITSELF,
    ),
    "FullyShardedDataParallelPlugin": "use Accelerator(strategy=instep.strategies.FSDPStrategy(...))",
    "DeepSpeedPlugin": 'use strategy="deepspeed_stage_2", or DeepSpeedStrategy, which takes the plugin\'s values',
    **dict.fromkeys(
        (
            "MegatronLMPlugin", "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler", "MegatronEngine",
            "avg_losses_across_data_parallel_group",
        ),
        "instep has no Megatron-LM: use Trainer(strategy=instep.strategies.MeshStrategy(tp=, pp=)), as "
        "docs/scale/strategies.md says",
    ),
    **dict.fromkeys(("NeptuneLogger", "LitLogger"), _OWN_LOGGER),
    "XLAProfiler": 'use Trainer(profiler="simple"), or torch_xla.debug.profiler around fit',
    **dict.fromkeys(
        (
            "OffloadedWeightsLoader", "PrefixedDataset", "extract_submodules_state_dict", "load_offloaded_weight",
            "load_offloaded_weights", "offload_state_dict", "offload_weight", "save_offload_index",
        ),
        "disk_offload and load_checkpoint_and_dispatch of instep.big_models write and read what is offloaded; weights "
        "are ordinary safetensors files",
    ),
    **dict.fromkeys(
        ("calculate_maximum_sizes", "get_max_layer_size"),
        "use instep.big_models.compute_module_sizes, or `instep estimate-memory`",
    ),
    "load_state_dict": "use instep.checkpoint.load_weights",
    **dict.fromkeys(
        ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"),
        "mixed_precision='fp8' is torchao's; for other recipes use torchao's own call",
    ),
    **dict.fromkeys(
        (
            "DeepSpeedSequenceParallelConfig", "TorchContextParallelConfig", "TorchTensorParallelConfig",
            "TorchTensorParallelPlugin",
        ),
        "use Trainer(strategy=instep.strategies.MeshStrategy(dp_shard=, tp=, cp=))",
    ),
    "PrecisionType": 'use its name: "no", "fp16", "bf16" or "fp8"',
    "merge_fsdp_weights": "use `instep merge-weights`",
    "write_basic_config": "use `instep config default`",
    "PrepareForLaunch": "use instep.notebook_launcher, or `instep launch`",
    "patch_environment": "use os.environ",
    "Checkpoint": "use ModelCheckpoint",
    **dict.fromkeys(("DummyOptim", "DummyScheduler"), "give the optimizer or the scheduler itself"),
    "SeedableRandomSampler": "use DataLoader(shuffle=True); `launch --as accelerate` knows use_seedable_sampler=True",
    "__version__": "it stays, and is that package's, which must be installed then; instep counts its own",
    "Metric": "torchmetrics.Metric works as it is",
}  # fmt: skip
"""Advice about names that have no counterpart in instep."""


RENAMED = {
    "Trainer": {
        "num_processes": "devices",
        "replace_sampler_ddp": "use_distributed_sampler",
        "checkpoint_callback": "enable_checkpointing",
        "gpus": "devices",
        "tpu_cores": "devices",
        **dict.fromkeys(("epochs", "n_epochs", "num_epochs", "num_train_epochs"), "max_epochs"),
        **dict.fromkeys(("steps", "num_steps", "num_train_steps"), "max_steps"),
        "output_dir": "default_root_dir",
    },
    "launch": {
        "nproc_per_node": "devices",
        "gpu_ids": "devices",
        "num_machines": "num_nodes",
        "nnodes": "num_nodes",
        "machine_rank": "node_rank",
        "main_process_ip": "master_addr",
        "main_address": "master_addr",
        "main_process_port": "master_port",
        "main_port": "master_port",
        "rdzv_id": "run_id",
        "mixed_precision": "precision",
        "gradient_accumulation_steps": "accumulate_grad_batches",
        "num_cpu_threads_per_process": "cpu_threads",
        "enable_cpu_affinity": "cpu_affinity",
    },
    **{
        key: {"tensor": "data"}
        for key in (
            "Accelerator.gather",
            "Accelerator.pad_across_processes",
            "Accelerator.reduce",
            "broadcast",
            "convert_to_fp32",
            "gather",
            "pad_across_processes",
            "pad_input_tensors",
            "send_to_device",
        )
    },
    "Accelerator.gather_for_metrics": {"input_data": "data"},
    "Accelerator.prepare_data_loader": {"data_loader": "loader"},
    "Accelerator.profile": {"profile_handler": "handler"},
    "reduce": {"tensor": "data", "reduction": "op"},
    "gather_object": {"object": "obj"},
    "broadcast_object_list": {"object_list": "objects"},
    "skip_first_batches": {"dataloader": "loader"},
    "synchronize_rng_states": {"rng_types": "types"},
    "Trainer.fit": {"train_dataloader": "train_dataloaders", "val_dataloader": "val_dataloaders"},
    "Trainer.validate": {"val_dataloaders": "dataloaders"},
    "Trainer.test": {"test_dataloaders": "dataloaders"},
    "TrainerArgumentParser.add_instep_class_args": {"lightning_class": "instep_class"},
}
"""Class, method or command -> its arguments that have another name in instep -> this name."""

ADDED = {("Trainer", "gpus"): 'accelerator="gpu"', ("Trainer", "tpu_cores"): 'accelerator="xla"'}
"""Argument to add when a renamed argument implies it: `gpus=2` becomes `devices=2` and `accelerator="gpu"`."""

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
    "Accelerator": {"use_seedable_sampler": "the order always is a function of seed and epoch"},
    "DataLoaderConfiguration": {"use_seedable_sampler": "the order always is a function of seed and epoch"},
}  # fmt: skip
"""Class or function -> its arguments that can be left out -> why."""

_NO_CLOUD = "instep starts no cloud machines; docs/scale/hardware.md says how it runs on SageMaker's"
_POD = "start the program on each host of the pod; docs/scale/hardware.md says how"
_IN_DATALOADER_CONFIG = "it is in DataLoaderConfiguration, given as dataloader_config"
_MESH = (
    "use --strategy with MeshStrategy's names (tp, cp, pp), or Trainer(strategy=MeshStrategy(dp_shard=, tp=, cp=, pp=))"
)

_STRICT = (
    "a state is loaded as a whole, with names that match. Weights that fit in part are loaded by "
    "model.load_state_dict(safetensors.torch.load_file(...), strict=False); resume=Resume(...) leaves parts of it out"
)

INSTEAD: dict[str, dict[str, str]] = {
    "Accelerator.load_state": {
        **dict.fromkeys(("strict", "load_module_strict"), _STRICT),
        **dict.fromkeys(
            ("load_optimizer_states", "load_lr_scheduler_states", "load_module_only"),
            "use resume=Resume(...), which says the parts that are loaded",
        ),
        "map_location": "leave it out: each tensor is read to where the model has it",
        "load_kwargs": "leave it out: nothing is unpickled",
    },
    "Trainer": {
        "plugins": "use precision=... and strategy=...; torchrun's environment is read by itself",
        "model_registry": "upload the checkpoint folder, or export plain safetensors from it",
        **dict.fromkeys(("resume_from_checkpoint", "ckpt_path"), "use trainer.fit(..., ckpt_path=...)"),
        "checkpoint_callback": "use enable_checkpointing=... or callbacks=[ModelCheckpoint(...)]",
        "weights_summary": "use enable_model_summary=..., or callbacks=[ModelSummary(max_depth=...)]",
        "terminate_on_nan": "use nonfinite='stop'",
        "progress_bar_refresh_rate": "use callbacks=[TQDMProgressBar(refresh_rate=...)], or enable_progress_bar=False",
        "prepare_data_per_node": "set it on the module or the DataModule: self.prepare_data_per_node = ...",
        "track_grad_norm": "use callbacks=[GradientMonitor()]",
        "auto_select_gpus": "leave it out: devices=... takes the first ones, and CUDA_VISIBLE_DEVICES chooses",
        "flush_logs_every_n_steps": "leave it out: a thread writes rows as they come",
        "auto_lr_find": "use instep.Tuner(trainer).lr_find(model), or callbacks=[LearningRateFinder()]",
        "auto_scale_batch_size": "use instep.Tuner(trainer).scale_batch_size(model), or callbacks=[BatchSizeFinder()]",
        "gradient_accumulation_steps": "use accumulate_grad_batches=...",
        "max_grad_norm": "use gradient_clip_val=...",
        "mixed_precision": "use precision='bf16-mixed' or '16-mixed'",
        "seed": "call instep.seed_everything(seed) before the model is made",
        "batch_size": "the loader has it: DataLoader(..., batch_size=...)",
        **dict.fromkeys(("lr", "learning_rate"), "the module's configure_optimizers gives it to the optimizer"),
        **dict.fromkeys(("swa", "stochastic_weight_avg"), _AVERAGING),
    },
    "Accelerator": {
        "fp16": "use mixed_precision='fp16'",
        "precision": "use mixed_precision='bf16' or 'fp16'",
        "accumulate_grad_batches": "use gradient_accumulation_steps=...",
        "gradient_clip_val": "call accelerator.clip_grad_norm_(model.parameters(), ...) before optimizer.step()",
        "logger": "use log_with=...",
        **dict.fromkeys(("devices", "num_processes", "num_nodes"), "start the script with instep launch, which has it"),
        "dispatch_batches": _IN_DATALOADER_CONFIG,
        "even_batches": _IN_DATALOADER_CONFIG,
        "rng_types": "call instep.accelerator.synchronize_rng_states(...) where random states must be alike",
        "deepspeed_plugin": "use strategy='deepspeed_stage_2' (0 to 3), or a DeepSpeedStrategy",
        "fsdp_plugin": "use strategy='fsdp', or strategy=FSDPStrategy(...) for its options",
        "megatron_lm_plugin": "instep has no Megatron-LM; use strategy=MeshStrategy(tp=...), and a Trainer for pp=...",
        "torch_tp_plugin": "use strategy=MeshStrategy(tp=...)",
    },
    "FSDPStrategy": {
        "sharding_strategy": "leave it out for FULL_SHARD; use reshard_after_forward=False for SHARD_GRAD_OP, "
        "dp_replicate=... for HYBRID_SHARD, strategy='ddp' for NO_SHARD",
        "auto_wrap_policy": "use wrap=...",
        "transformer_cls_names_to_wrap": "use wrap=...",
        "min_num_params": "use wrap=... with that number",
        "activation_checkpointing_policy": "use activation_checkpointing=...",
        "mixed_precision": "use Trainer(precision='bf16-mixed')",
        "mixed_precision_policy": "use mp_policy=... or Trainer(precision='bf16-mixed')",
        "state_dict_type": "every checkpoint is sharded, and `instep checkpoint convert` makes one plain file of it",
        "device_mesh": "use dp_replicate=..., or MeshStrategy",
        "data_parallel_size": "use MeshStrategy(dp_shard=...)",
        "tensor_parallel_size": "use MeshStrategy(tp=...)",
        "cpu_ram_efficient_loading": "use meta_init=True",
        "use_orig_params": "leave it out; parameters keep their names",
        "sync_module_states": "leave it out; all ranks get the first one's weights",
        "limit_all_gathers": "leave it out",
        "fsdp_version": "leave it out; it is FSDP2",
    },
    "DeepSpeed's config": {  # keys that the Trainer sets, or that would change what is read or saved
        "scheduler": "configure_optimizers returns the schedule; deepspeed.runtime.lr_schedules has DeepSpeed's",
        "train_batch_size": "the batch is the Trainer's: Trainer(global_batch_size=...) and the loader's batch_size",
        "amp": "choose Trainer(precision='bf16-mixed') or '16-mixed'",
        "elasticity": "torchrun and `instep launch` are elastic, with Trainer(global_batch_size=...)",
        "data_efficiency": "it works with DeepSpeed's own loader only",
        "curriculum_learning": "it works with DeepSpeed's own loader only",
        "hybrid_engine": "it is not supported",
        "tensor_parallel": "MeshStrategy(tp=...) has tensor parallelism",
        "sequence_parallel_size": "MeshStrategy(tp=..., cp=...) has sequence and context parallelism",
    },
    "QuantizationAwareTraining": {  # a callback of Lightning 1, which used torch.quantization
        "qconfig": "use config=...: torchao's configuration of the quantized model, which has its own default",
        "observer_type": "leave it out: torchao rounds weights and inputs in training as the quantized model does",
        "collect_quantization": "use start_epoch=...",
        "modules_to_fuse": "leave it out: torchao quantizes layers as they are; filter_fn=... chooses them",
        "input_compatible": "leave it out: a quantized module takes the same inputs",
        "quantize_on_fit_end": "use convert_at_end=...",
        "observer_enabled_stages": "leave it out: evaluation rounds too",
    },
    "notebook_launcher": {
        "mixed_precision": "give precision= to the Trainer or Accelerator in the function",
        "use_port": "master_port",
        "rdzv_backend": "num_nodes, node_rank, master_addr and master_port",
        "rdzv_endpoint": "master_addr and master_port",
        "rdzv_id": "run_id",
        "monitor_interval": "nothing: the ranks are looked at ten times a second",
        "log_line_prefix_template": "log_dir and tee=True",
    },
    "launch": {  # each key is the beginning of an option's name
        "zero_stage": "use --strategy deepspeed_stage_2 (0 to 3)",
        "offload_": "use --strategy deepspeed_stage_3 --strategy-options offload_optimizer=cpu,offload_parameters=cpu",
        "deepspeed_config": "use --strategy deepspeed --strategy-options config=FILE",
        "deepspeed": "nodes are started by `instep slurm`, mpirun or `instep launch` on each; the rest of it are "
        "arguments of DeepSpeedStrategy",
        "zero3_": "weights are always built in parts and merged when they are saved (docs/scale/deepspeed.md)",
        "gradient_clipping": "use Trainer(gradient_clip_val=...) or accelerator.clip_grad_norm_()",
        "fsdp": "use --strategy fsdp --strategy-options NAME=VALUE; docs/scale/fsdp.md lists FSDPStrategy's arguments",
        "megatron_lm": _MESH,
        "use_megatron_lm": _MESH,
        "parallelism_config": _MESH,
        "use_parallelism_config": _MESH,
        "dynamo": "set it in the program: Trainer(compile=...) or Accelerator(compile=...), docs/scale/compile.md",
        "fp8": "use --precision fp8; for other recipes torchao's own call in configure_model",
        "downcast_bf16": "use --precision bf16-true",
        "no_tpu": "it is the default; leave it out",
        "tpu": _POD,
        "vm": _POD,
        "command": "Google's gcloud runs commands on the hosts of a pod; docs/scale/hardware.md says how",
        "ipex": "leave it out: what it did is in torch itself",
        "mpirun": "use `mpirun -n N python train.py`: instep reads its variables",
        "aws": _NO_CLOUD,
        "ec2": _NO_CLOUD,
        "compute_environment": _NO_CLOUD,
        "main_training_function": "the whole script runs in each rank; leave it out",
        "monitor_interval": "the agent looks ten times a second; leave it out",
        "start_method": "ranks are programs of their own; leave it out",
        "role": "all ranks have the same role; leave it out",
        "redirects": "use --log-dir, which takes the output of all ranks",
        "local_ranks_filter": "use --log-dir with --tee 0",
        "logs_specs": "use --log-dir and --tee",
        "rdzv": "use --rdzv-backend, --rdzv-endpoint and --rdzv-conf",
        "debug_": "use --debug",
    },
}
"""Class, method or command -> its arguments that instep does not have -> what to do in place of them."""

LAUNCH_SWITCHES: dict[str, dict[str, Any]] = {
    "cpu": {"accelerator": "cpu"},
    "use_cpu": {"accelerator": "cpu"},
    "multi_gpu": {"accelerator": "gpu"},
    "tpu": {"accelerator": "xla"},
    "use_fsdp": {"strategy": "fsdp"},
    "use_deepspeed": {"strategy": "deepspeed"},
    "use_mps_device": {"accelerator": "mps"},
    "use_xpu": {"accelerator": "xpu"},
    "standalone": {"num_nodes": 1},
    "same_network": {},
}
"""Settings that a switch of another launcher stands for."""

DISTRIBUTED_TYPES: dict[str, dict[str, Any]] = {
    "NO": {},
    "MULTI_CPU": {"accelerator": "cpu"},
    "MULTI_GPU": {"accelerator": "gpu"},
    "MULTI_XPU": {"accelerator": "xpu"},
    "MULTI_HPU": {"accelerator": "hpu"},
    "MULTI_NPU": {"accelerator": "npu"},
    "FSDP": {"strategy": "fsdp"},
    "DEEPSPEED": {"strategy": "deepspeed"},
    "XLA": {"accelerator": "xla"},
}
"""Settings that a value of Accelerate's `distributed_type` stands for."""

FILES_REFUSED = {
    ("distributed_type", "MEGATRON_LM"): "instep has no Megatron-LM. MeshStrategy has what it is used for: write "
    "Trainer(strategy=MeshStrategy(tp=, pp=)), as docs/scale/strategies.md says",
    ("compute_environment", "AMAZON_SAGEMAKER"): "instep starts no jobs of SageMaker. Start them with its own "
    "package, and `instep launch` in them, as docs/scale/hardware.md says",
}
"""Settings for which a config file of Accelerate is refused, since its other settings would not mean the same here."""

COMMANDS_OF_OTHERS = {
    "tpu-config": "Google's gcloud runs a command on all hosts of a pod; docs/scale/hardware.md says how",
    "to-fsdp2": "it is not needed: strategy 'fsdp' is FSDP2; docs/porting/accelerate.md has the arguments that changed",
}
"""Commands of Accelerate that instep does not have, and what to do instead."""


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
"""(class, argument) -> values of this text argument that have another name in instep -> this name."""


HOOKS_GONE = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "predict_epoch_end": "on_predict_epoch_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "test_step_end": "test_step",
}
"""Hooks of Lightning 1.x, and the hooks and methods that replace them."""

HOOKS_UNCALLED = {
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_init_start": "__init__",
    "on_init_end": "__init__",
    "on_keyboard_interrupt": "on_exception of a callback",
    "on_configure_sharded_model": "configure_model of the module",
    "on_before_accelerator_backend_setup": "setup",
    "on_post_move_to_device": "on_fit_start",
    "on_hpc_save": "on_save_checkpoint",
    "on_hpc_load": "on_load_checkpoint",
}
"""More hooks of Lightning 1.x. A user's own method may have such a name, so the name causes only a warning."""


_TUNER = "use instep.Tuner(trainer).lr_find(model) or .scale_batch_size(model)"
_UNCALLED = {old: f"use `{new}`" for old, new in HOOKS_UNCALLED.items()}
_LOOPS = (
    "`trainer.current_epoch` and `trainer.global_step` say where a run stands, and `trainer.max_epochs = ...` between "
    "two fits lets the second go on"
)

_NO_SAMPLE = "leave it out: a rank that has no sample left replays one with weight 0"

ATTRIBUTES = {
    "Accelerator": {
        "trigger_sync_in_backward": "use `accumulate`, or `no_sync` where gradients wait",
        "native_amp": "ask `accelerator.mixed_precision`",
    },
    "DistributedType": {"TPU": "write `DistributedType.XLA`"},
    "Trainer": {
        "add_argparse_args": "declare the arguments that the script takes, or use instep.cli.TrainerCLI",
        "from_argparse_args": "call Trainer(...) with the arguments, or use instep.cli.TrainerCLI",
        "precision_plugin": "`trainer.precision` is its name",
        "scaler": "the strategy owns it",
        "init_module": "build large layers in `configure_model`",
        "distributed_sampler_kwargs": "`trainer.strategy` has `data_rank` and `data_world_size`",
        "val_check_batch": "`trainer.val_check_interval` is the argument",
        "enable_autolog_hparams": "save_hyperparameters(logger=False) keeps them out of the loggers",
        "suggest_integrations": "nothing is suggested",
        **dict.fromkeys(("tune", "tuner", "lr_find"), _TUNER),
        **dict.fromkeys(("fit_loop", "validate_loop", "test_loop", "predict_loop"), _LOOPS),
    },
    "TrainModule": {
        "fabric": "there is none",
        "allow_zero_length_dataloader_with_multiple_devices": _NO_SAMPLE,
        "configure_sharded_model": "use `configure_model`",
        "tbptt_split_batch": "cut sequences in the data set, or use manual optimization",
        "get_progress_bar_dict": "override LiveProgressBar.get_metrics",
        **_UNCALLED,
    },
    "DataModule": {"allow_zero_length_dataloader_with_multiple_devices": _NO_SAMPLE},
    "WandbLogger": dict.fromkeys(
        ("download_artifact", "use_artifact"), "use what `logger.experiment` has, W&B's own run"
    ),
    "Callback": _UNCALLED,
    **{
        leaf: {"use_distributed": "ask `num_processes > 1`", "default_device": "use `device`"}
        for leaf in ("PartialState", "AcceleratorState")
    },
}
"""Class of instep -> attributes and methods that it does not have -> what to do about them."""


STEP_ARGUMENTS = {
    "optimizer_idx": "one training_step serves all optimizers; to step each by itself, use manual optimization",
    "hiddens": "cut sequences in the data set, or use manual optimization",
}
"""Parameters of step methods that never get a value in instep, with advice."""


def instead_of(owner: str, name: str) -> str | None:
    """Return what to write in place of another package's argument; None if the tables do not have the argument.

    Example:
        >>> instead_of("Trainer", "gpus")
        'use accelerator="gpu", devices=...'
    """
    if name in INSTEAD.get(owner, {}):
        return INSTEAD[owner][name]
    if name in RENAMED.get(owner, {}):
        more = ADDED.get((owner, name))
        return f"use {f'{more}, ' if more else ''}{RENAMED[owner][name]}=..."
    reason = DROPPED.get(owner, {}).get(name)
    return f"leave it out: {reason}" if reason else None


def canonical(name: str) -> str | None:
    """Convert a dotted name of Lightning or Accelerate to its canonical form; return None for any other name.

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
    """Return instep's dotted name for a canonical name; None if instep has no counterpart.

    Example:
        >>> successor("lightning.callbacks.early_stopping.EarlyStopping")
        'instep.callbacks.EarlyStopping'
    """
    root, _, rest = name.partition(".")
    parents, _, leaf = rest.rpartition(".")
    if leaf == "ModelSummary" and parents.startswith("utilities"):
        leaf = "summarize"  # the function that replaces the class; ModelSummary of instep is a callback
    # A capital in `parents` means that the name is an attribute of a class, which no table has.
    return None if parents != parents.lower() else moved().get(root, {}).get(leaf)


def advice(name: str) -> str:
    """Return advice for a canonical name that has no counterpart in instep."""
    *parts, leaf = name.split(".")
    if ".demos" in name or ".test_utils" in name:
        return "it is of a package for demonstrations and tests: copy it, or take your own"
    if leaf.startswith("is_") and leaf.endswith("_available"):
        return "ask torch, or importlib.util.find_spec"
    if leaf in ADVICE:
        return ADVICE[leaf]
    if parts in (["fabric"], ["fabric", "fabric"], ["fabric", "wrappers"]) and leaf not in PARTS_OF_LIGHTNING:
        return "instep.Accelerator is for handwritten loops; `instep launch --as fabric` runs programs of Fabric"
    if parts and parts[0] in ("fabric", "lightning") and parts[-1] != "imports":
        for part in (leaf, *reversed(parts)):
            if part in PARTS_OF_LIGHTNING:
                return PARTS_OF_LIGHTNING[part]
    return "instep has nothing of that name"


def hint_of_object(value: Any) -> str:
    """Return what to write in place of an object or class of Lightning or Accelerate; "" for any other object.

    Args:
        value: the object or class that was passed. A user's subclass of one of their classes counts too.
    """
    kind = value if isinstance(value, type) else type(value)
    for base in kind.__mro__:
        name = canonical(f"{base.__module__}.{base.__qualname__}")
        if name is None:
            continue
        whose = "Accelerate's" if name.startswith("accelerate") else "Lightning's"
        new = successor(name)
        if new is None:
            return f"{base.__name__} is {whose}: {advice(name)}"
        if base is kind:
            return f"{base.__name__} is {whose}: use {new} in its place"
        return f"{kind.__name__} is derived from {whose} {base.__name__}: change its base class to {new}"
    return ""


OTHER_NAMES = {field: values for (owner, field), values in VALUES.items() if owner == "Trainer"}
"""Setting of the Trainer -> names that other packages use for its values -> instep's names."""


def hint_for(name: str) -> str | None:
    """Return the replacement for a name that does not exist in instep; None if no table has the name.

    Example:
        >>> hint_for("LightningModule")
        'use instep.TrainModule'
    """
    for root in ("lightning", "accelerate"):
        if (found := successor(f"{root}.{name}")) is not None:
            return f"use {found}"
    return ADVICE.get(name)


def no_such_name(package: str, name: str) -> AttributeError | ImportError:
    """Return the error for a name that a package of instep does not have, to be raised by its `__getattr__`.

    If Lightning or Accelerate has the name, the message says what replaces it. In `from package import name`, Python
    drops the message of an AttributeError, so the function returns an ImportError there.
    """
    hint = hint_for(name)
    # importlib calls `__getattr__` from this function during `from ... import`
    if hint is not None and sys._getframe(2).f_code.co_name == "_handle_fromlist":
        return ImportError(f"cannot import {name!r} from {package!r}: {hint}", name=package)
    text = f"module {package!r} has no attribute {name!r}{f': {hint}' if hint else ''}"
    return AttributeError(f"{text}; it has {', '.join(sys.modules[package].__all__)}")
