"""Tables of other packages' names, which only `instep migrate` and `instep.compat` read."""

from __future__ import annotations

LIGHTNING_MODULES = frozenset(
    (
        "accelerators", "apply_func", "argparse", "batch_size_finder", "callback", "callbacks", "checkpoint",
        "cli", "cloud_io", "collectives", "combined_loader", "comet", "core", "csv_logs", "data", "datamodule",
        "ddp", "deepspeed", "demos", "device_parser", "device_stats_monitor", "distributed", "early_stopping",
        "enums", "environments", "exceptions", "fabric", "finetuning", "fsdp",
        "gradient_accumulation_scheduler", "grads", "hooks", "hparams_mixin", "imports", "io",
        "lambda_function", "launchers", "litlogger", "logger", "loggers", "loops", "lr_finder", "lr_monitor",
        "memory", "mixins", "mlflow", "mnist_datamodule", "model_checkpoint", "model_helpers", "model_parallel",
        "model_summary", "module", "neptune", "on_exception_checkpoint", "optimizer", "overrides", "parallel",
        "parsing", "plugins", "precision", "prediction_writer", "profilers", "progress", "progress_bar",
        "pruning", "pytorch", "rank_zero", "rich_model_summary", "rich_progress", "saving", "seed", "serve",
        "single_device", "spike", "states", "stochastic_weight_avg", "strategies", "strategy", "tensorboard",
        "throughput", "throughput_monitor", "timer", "tqdm_progress", "trainer", "tuner", "types", "utilities",
        "wandb", "warnings", "weight_averaging", "xla",
    )
)  # fmt: skip
"""Last words of the dotted names of Lightning's modules that `instep.compat.lightning` provides."""
MODULES = {
    "lightning": "instep",
    "lightning.callbacks": "instep.callbacks",
    "lightning.loggers": "instep.loggers",
    "lightning.profilers": "instep.profilers",
    "lightning.strategies": "instep.strategies",
    "accelerate": "instep",
}
GONE = {"cli_lightning_logo": "it printed a logo"}
"""Functions of Lightning whose calls can be left out, since instep has nothing like them -> what they did."""
_PACKAGES = (
    "bitsandbytes", "boto3", "clearml", "comet_ml", "datasets", "deepspeed", "hydra", "matplotlib", "mlflow", "numpy",
    "omegaconf", "onnx", "pandas", "peft", "psutil", "requests", "rich", "schedulefree", "sklearn", "tensorboard",
    "tensorboardX", "timm", "torchao", "torchdata", "torchvision", "tqdm", "transformers", "triton", "wandb",
)  # fmt: skip
_FIND = "from importlib.util import find_spec"
DEFINED = {
    "_PATH": ("import os", "str | os.PathLike"),
    "is_initialized": ("from instep import AcceleratorState", "lambda: AcceleratorState().initialized"),
    "is_bf16_available": (
        "import torch",
        "lambda ignore_tpu=False: not torch.cuda.is_available() or torch.cuda.is_bf16_supported()",
    ),
    "_IS_WINDOWS": ("import sys", 'sys.platform == "win32"'),
    **{f"_{name.upper()}_AVAILABLE": (_FIND, f'find_spec("{name}") is not None') for name in _PACKAGES},
    **{f"is_{name}_available": (_FIND, f'lambda: find_spec("{name}") is not None') for name in _PACKAGES},
    "is_bnb_available": (_FIND, 'lambda: find_spec("bitsandbytes") is not None'),
    **{
        f"is_{name}_available": ("import torch", f'lambda: hasattr(torch, "{name}") and torch.{name}.is_available()')
        for name in ("mlu", "musa", "npu", "sdaa")
    },
}
"""Small values and functions that a script can define itself: name -> the import that is needed, and the expression."""
CALLS = {"accelerate.state.is_initialized": "instep.AcceleratorState().initialized"}
"""Full name of a function -> the expression that replaces a call of it."""
OF_OTHERS = {
    "PyTorchLightningPruningCallback": "use instep.callbacks.OptunaPruning(trial, monitor)",
    **dict.fromkeys(
        ("TuneReportCallback", "TuneReportCheckpointCallback", "RayTrainReportCallback"),
        "use instep.callbacks.RayReport(metrics)",
    ),
}
"""Name of a class that another package (optuna-integration, Ray) offers for Lightning -> advice about it."""
NOT_A_BASE = {
    "Logger": "its hooks are other ones: `_log_metrics`, `_log_hyperparams`, `_start`, `_finalize`",
    "Strategy": "its methods are other ones: see instep/strategies/base.py",
}
"""Instep's name of a class whose subclasses must be changed by hand -> why. Other uses of the class are migrated."""
INTO_DATALOADER_CONFIG = ("dispatch_batches", "even_batches")
"""Arguments of Accelerate's `Accelerator` that are fields of `dataloader_config` in instep."""
POSITIONAL = {
    "TensorBoardLogger": 7,
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
"""Number of leading positional arguments that mean the same in instep. If a name is not listed, all of them do."""
PARTS = {
    "Trainer": {
        "checkpoint_callback": "instep.callbacks.ModelCheckpoint",
        "early_stopping_callback": "instep.callbacks.EarlyStopping",
        "strategy": "instep.strategies.Strategy",
    },
    "Accelerator": {
        "state": "instep.AcceleratorState",
        "gradient_state": "instep.GradientState",
        "project_configuration": "instep.accelerator.ProjectConfiguration",
    },
    "TrainModule": {"trainer": "instep.Trainer"},
    "DataModule": {"trainer": "instep.Trainer"},
    "TrainerCLI": {"trainer": "instep.Trainer", "parser": "instep.cli.TrainerArgumentParser"},
}
"""Instep's class -> its attributes, each with the class of its value."""
PARAMETERS = {"trainer": "instep.Trainer", "pl_module": "instep.TrainModule"}
"""Name of a parameter in a script of Lightning -> class of its value."""
ALIASES = {
    "lightning_module": "write `model`; it is an alias with a warning",
    "deepspeed_plugin": "it is None here: an Accelerator has no DeepSpeed; a Trainer's strategy has its options",
}
"""Attributes that exist only for code written for Lightning or Accelerate, and what to write in their place."""
ATTRIBUTES_RENAMED = {"add_lightning_class_args": "add_instep_class_args"}
"""Attributes and methods that have another name in instep; no other package uses the old names."""
ANYWHERE = {
    "fsdp_plugin": "the options are FSDPStrategy's: Accelerator(strategy=instep.strategies.FSDPStrategy(...))",
}
"""Name of an attribute that only one package has, so the class of the object need not be known -> advice about it."""
NOT_SET = {
    **dict.fromkeys(("lr_scheduler_configs", "optimizers"), "return them from the module's `configure_optimizers`"),
    "callbacks": "give them to the Trainer, or return them from the module's `configure_callbacks`",
    **dict.fromkeys(("logger", "loggers"), "give it to the Trainer"),
    "model": "give it to `fit`",
}
"""What to do instead of setting an attribute that is read-only in instep."""
ENVIRONMENT = {
    "PL_TRAINER_": "arguments of the Trainer are not read from the environment, but for what `instep env` lists",
    "ACCELERATE_": "it is not read; `instep env` lists what is",
}
