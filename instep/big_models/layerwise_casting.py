"""Store weights in a narrower dtype than the dtype in which their layers compute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.big_models.hooks import ModelHook, add_hook_to_module
from instep.utils.checks import wrong
from instep.utils.dtypes import cast_module

_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class LayerwiseCastingHook(ModelHook):
    """Hook that keeps a module's weights in one dtype, and converts them to another for its forward.

    Use it for inference only, since the weights lose precision in the narrower dtype.

    Args:
        storage_dtype: dtype in which weights are kept, such as `torch.float8_e4m3fn`.
        compute_dtype: dtype in which the module computes.
        non_blocking: whether the host goes on while a device converts.

    Raises:
        SettingError: a dtype is not a floating-point dtype.

    Example:
        >>> layer = add_hook_to_module(nn.Linear(2, 2), LayerwiseCastingHook(torch.bfloat16, torch.float32))
        >>> layer(torch.ones(1, 2)).dtype, layer.weight.dtype
        (torch.float32, torch.bfloat16)

    Source: the class of this name in Hugging Face Accelerate.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        for name, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise wrong(name, dtype, "a floating torch.dtype, such as torch.float8_e4m3fn")
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return cast_module(module, self.storage_dtype, self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cast_module(module, self.compute_dtype, self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        cast_module(module, self.storage_dtype, self.non_blocking)
        return output

    def after_error(self, module: nn.Module) -> None:
        cast_module(module, self.storage_dtype, self.non_blocking)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return cast_module(module, self.compute_dtype, self.non_blocking)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolutional layers in a narrower dtype than the layers compute in.

    Args:
        module: the model.
        storage_dtype: dtype in which weights are kept, such as `torch.float8_e4m3fn`.
        compute_dtype: dtype in which layers compute.
        skip_modules_pattern: regular expressions; modules whose names match, and their submodules, are left out.
        skip_modules_classes: modules of these classes, and their submodules, are left out.
        non_blocking: whether the host goes on while a device converts.

    Raises:
        SettingError: a dtype is not a floating-point dtype.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
        >>> model(torch.ones(1, 4)).dtype, model[0].weight.dtype, model[1].weight.dtype
        (torch.float32, torch.bfloat16, torch.float32)

    Source: the function of this name in Hugging Face Accelerate.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()

    def visit(part: nn.Module, name: str) -> None:
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, _CAST):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for key, child in part.named_children():
            visit(child, f"{name}.{key}".removeprefix("."))

    visit(module, "")
