"""The map of names by which Accelerate's own tests run over instep.

Names come from `instep.utils.porting`, as `instep migrate` writes them, and from the table below, which holds only what
means the same. Nothing of Accelerate is kept: its `test_utils`, which its tests use, are executed from its sources.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

from packaging.version import parse
from placeholders import Finder
from torch import nn

import instep.big_models
from instep.big_models import compute_module_sizes
from instep.state import GradientState, PartialState
from instep.utils import porting
from instep.utils.checks import parse_size

# By the last word.
BY_HAND = {
    "DataLoaderShard": "instep.accelerator.loader.AcceleratedLoader",
    "AcceleratedOptimizer": "instep.accelerator.wrappers.AcceleratedOptimizer",
    "AcceleratedScheduler": "instep.accelerator.wrappers.AcceleratedScheduler",
    "DistributedOperationException": "instep.errors.DistributedError",
    "LOGGER_TYPE_TO_CLASS": "instep.accelerator.trackers.LOGGER_TYPE_TO_CLASS",
    "TensorBoardTracker": "instep.loggers.TensorBoardLogger",
    "WandBTracker": "instep.loggers.WandbLogger",
}
_PACKAGES = {
    "bnb": "bitsandbytes",
    "pytest": "pytest",
    "torchdata_stateful_dataloader": "torchdata.stateful_dataloader",
    "peft_model": "peft",
    "pippy": "torch",
}
_NOT_HERE = (
    *("cuda", "xpu", "mps", "npu", "mlu", "musa", "sdaa", "hpu", "neuron", "fp16", "fp8", "habana_gaudi1"),
    *("transformer_engine_mxfp8", "import_timer", "bitsandbytes_multi_backend"),
)
_UPCAST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)
_COMPARE = {"==": eq, "!=": ne, ">": gt, ">=": ge, "<": lt, "<=": le}


# ---- small things that only tests need; tests of these themselves are internal


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def str_to_bool(text: str) -> int:
    return int(text.lower() in ("y", "yes", "t", "true", "on", "1"))


def compare_versions(package: Any, operation: str, wanted: str) -> bool:
    here = version(package) if isinstance(package, str) else str(package)
    return _COMPARE[operation](parse(here), parse(wanted))


def is_torch_version(operation: str, wanted: str) -> bool:
    return compare_versions("torch", operation, wanted)


def check_cuda_fp8_capability() -> bool:
    return False


def convert_file_size_to_int(size: int | str) -> int:
    return parse_size("size", size, least=0)


def compute_module_total_buffer_size(model: nn.Module) -> int:
    return compute_module_sizes(model, buffers_only=True)[""]


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """A model with offloaded weights has their values in its own state dict."""
    return model.state_dict()


_HELPERS = {
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING": _UPCAST,
    "convert_file_size_to_int": convert_file_size_to_int,
    "compute_module_total_buffer_size": compute_module_total_buffer_size,
    "get_state_dict_offloaded_model": get_state_dict_offloaded_model,
    "patch_environment": patch_environment,
    "clear_environment": clear_environment,
    "str_to_bool": str_to_bool,
    "compare_versions": compare_versions,
    "is_torch_version": is_torch_version,
    "check_cuda_fp8_capability": check_cuda_fp8_capability,
    "BETA_CP_AVAILABLE_PYTORCH_VERSION": "2.6",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION": "2.3",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION": "4.47",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION": "99",
    "CannotPadNestedTensorWarning": UserWarning,
}


def _available(name: str) -> Any:
    what = name.removeprefix("is_").removesuffix("_available")

    def available(*args: Any, **kwargs: Any) -> bool:
        try:
            return what == "bf16" or (what not in _NOT_HERE and find_spec(_PACKAGES.get(what, what)) is not None)
        except ModuleNotFoundError:
            return False

    return available


def resolve(name: str) -> Any:
    """Give what has the place of a dotted name of Accelerate.

    Raises:
        LookupError: nothing has.
    """
    leaf = name.rpartition(".")[2]
    if leaf in _HELPERS:
        return _HELPERS[leaf]
    if leaf == "is_habana_gaudi1" or (leaf.startswith("is_") and leaf.endswith("_available")):
        return _available(leaf)
    if leaf in dir(instep.big_models):
        return getattr(instep.big_models, leaf)
    target = BY_HAND.get(leaf) or porting.successor(porting.canonical(name) or "")
    if target is None:
        raise LookupError(name)
    module, _, attribute = target.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise LookupError(name) from error


def executed(module: str) -> bool:
    """Say which modules are Accelerate's own: what its tests share."""
    return module.startswith("accelerate.test_utils")


def install(accelerate: Path) -> None:
    """Make `accelerate` importable, over instep."""
    Finder({"accelerate": accelerate / "src" / "accelerate"}, resolve, executed).install()
    import_module("accelerate").__file__ = str(accelerate / "src" / "accelerate" / "__init__.py")
    reset = PartialState._reset_state
    # A private method, which their tests call between tests; the views of a run end with it.
    PartialState._reset_state = staticmethod(lambda *_: reset())
    GradientState._reset_state = staticmethod(lambda *_: None)  # pyright: ignore
