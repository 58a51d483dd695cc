"""The map of names by which Lightning's own tests run over instep.

Names come from `instep.utils.porting`, as `instep migrate` writes them, and from the tables below, which hold only what
means the same. Nothing of Lightning is kept: its demo modules and its tests' helpers are executed from its sources.
"""

from __future__ import annotations

import operator
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from placeholders import Finder

from instep.utils import porting

# By the last word; the first that exists is taken, so that one map serves earlier and later versions of instep.
BY_HAND: dict[str, tuple[str, ...]] = {
    "MisconfigurationException": ("instep.errors.InstepError",),
    "PossibleUserWarning": ("builtins.UserWarning",),
    "LightningDeprecationWarning": ("builtins.DeprecationWarning",),
    "CSVLogger": ("instep.loggers.CSVLogger",),
    "LightningArgumentParser": ("instep.cli.TrainerArgumentParser",),
    "SaveConfigCallback": ("instep.cli.SaveConfigCallback",),
    "ArgsType": ("instep.cli.ArgsType",),
    "LRSchedulerCallable": ("instep.cli.LRSchedulerCallable",),
    "OptimizerCallable": ("instep.cli.OptimizerCallable",),
    "instantiate_class": ("instep.cli.instantiate_class",),
    "EarlyStoppingReason": ("instep.callbacks.EarlyStoppingReason",),
    "move_data_to_device": ("instep.distributed.send_to_device",),
    "AttributeDict": ("instep.utils.hparams.AttributeDict",),
    "HyperparametersMixin": ("instep.utils.hparams.HyperParameters",),
    "UNKNOWN_SIZE": ("instep.callbacks.model_summary.UNKNOWN_SIZE",),
    "TrainerState": ("instep.trainer.context.TrainerState",),
    "LRSchedulerConfig": ("instep.trainer.optimizers.LRSchedulerConfig",),
    "Optimizable": ("torch.optim.Optimizer",),
    **dict.fromkeys(("Tensor", "DataLoader", "Any"), ("typing.Any",)),
}
_ANY = (
    "STEP_OUTPUT",
    "LRSchedulerPLType",
    "LRSchedulerTypeTuple",
    "_METRIC",
    "_PATH",
    "LRScheduler",
    "ReduceLROnPlateau",
)


def is_overridden(method_name: str, instance: Any, parent: Any = None) -> bool:
    """Ask instep's function, whose arguments have another order."""
    from instep import Callback, DataModule, TrainModule
    from instep.trainer import hooks

    base = parent or next(kind for kind in (TrainModule, DataModule, Callback) if isinstance(instance, kind))
    return hooks.is_overridden(instance, method_name, base)


def _runif_reasons(**needs: Any) -> tuple[list[str], dict[str, bool]]:
    """Say what of a test's needs is missing here: GPUs, TPUs and a process of its own always are."""
    from lightning_utilities.core.imports import compare_version

    reasons = [name for name in ("min_cuda_gpus", "bf16_cuda", "tpu", "mps", "standalone") if needs.get(name)]
    packages = {name: name for name in ("deepspeed", "rich", "omegaconf", "psutil", "sklearn", "onnx", "onnxscript")}
    packages["tensorrt"] = "torch_tensorrt"
    reasons += [name for name, module in packages.items() if needs.get(name) and find_spec(module) is None]
    bounds = {"min_torch": operator.lt, "max_torch": operator.ge}
    for name, is_outside in bounds.items():
        if needs.get(name) and compare_version("torch", is_outside, needs[name], use_base_version=True):
            reasons.append(f"{name}={needs[name]}")
    if needs.get("min_python") and sys.version_info < tuple(int(part) for part in needs["min_python"].split(".")):
        reasons.append("min_python")
    kept = {name: True for name in ("min_cuda_gpus", "tpu", "standalone") if needs.get(name)}
    return reasons, kept


_DEFINED_HERE = {"_runif_reasons", "is_overridden"}
_AVAILABLE = {
    "_ONNX_AVAILABLE": "onnx", "_ONNXSCRIPT_AVAILABLE": "onnxscript", "_TORCH_TRT_AVAILABLE": "torch_tensorrt",
    "_PSUTIL_AVAILABLE": "psutil", "_TENSORBOARD_AVAILABLE": "tensorboard", "_DEEPSPEED_AVAILABLE": "deepspeed",
    "_MLFLOW_AVAILABLE": "mlflow", "_JSONARGPARSE_SIGNATURES_AVAILABLE": "jsonargparse",
}  # fmt: skip


def _load(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)


def resolve(name: str) -> Any:
    """Give instep's counterpart of a dotted name of Lightning, or raise LookupError."""
    leaf = name.rpartition(".")[2]
    if leaf in _DEFINED_HERE:
        return globals()[leaf]
    if leaf in _AVAILABLE:
        return find_spec(_AVAILABLE[leaf]) is not None
    if leaf in _ANY and ".types." in name:
        return Any
    if leaf == "__version__":
        return "2.6.2"
    if leaf == "rank_prefixed_message":
        return lambda message, rank: message
    short = porting.canonical(name)
    found = porting.successor(short) if short else None
    for dotted in (*((found,) if found else ()), *BY_HAND.get(leaf, ())):
        try:
            return _load(dotted)
        except (ImportError, AttributeError):
            continue
    raise LookupError(name)


def executed(module: str) -> bool:
    """Say whether a module is executed from Lightning's source: demos, and what says which packages are there."""
    return ".pytorch.demos" in module or module in (
        "lightning.pytorch.utilities.imports",
        "lightning.fabric.utilities.imports",
    )


def install(lightning: Path) -> None:
    """Make `lightning`, `pytorch_lightning` and `lightning_fabric` importable, over instep."""
    source = lightning / "src" / "lightning"
    roots = {"lightning": source, "pytorch_lightning": source / "pytorch", "lightning_fabric": source / "fabric"}
    Finder(roots, resolve, executed).install()
    sys.path.insert(0, str(lightning / "tests"))
    os.environ.setdefault("WANDB_MODE", "offline")
