"""`cast_module`: cast a module's floating-point parameters and buffers, where complex ones stay complex."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def cast_module(module: nn.Module, dtype: torch.dtype, non_blocking: bool = False) -> nn.Module:
    """Cast a module's floating-point parameters and buffers, in place.

    Complex parameters and buffers get the complex dtype of the same precision, or stay unchanged if there is none;
    `module.to(dtype)` would drop their imaginary parts.

    Args:
        module: module to cast.
        dtype: floating-point dtype.
        non_blocking: argument of `Tensor.to`.

    Returns:
        The same module.

    Example:
        >>> cast_module(nn.Linear(2, 1), torch.bfloat16).weight.dtype
        torch.bfloat16
    """
    of_complex = _COMPLEX.get(dtype)

    def cast(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else of_complex if tensor.is_complex() else None
        return tensor if wanted is None else tensor.to(wanted, non_blocking=non_blocking)

    return module._apply(cast)
