"""Precision: which dtype the weights have, which the step computes in, and whether gradients are scaled.

Orthogonal to the strategy: a `Precision` changes the module once, wraps the step in a context (or None: the loop then
enters nothing), and owns the gradient scaler.

    name          weights    step computes in      gradient scaler
    32-true       float32    float32               no
    64-true       float64    float64               no
    bf16-mixed    float32    autocast to bfloat16  no
    16-mixed      float32    autocast to float16   yes (not on a CPU)
    bf16-true     bfloat16   bfloat16              no
    16-true       float16    float16               no
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from instep.distributed.nested import map_leaves
from instep.errors import SettingError, one_of

T = TypeVar("T")

_WEIGHTS = {
    "32-true": None,
    "bf16-mixed": None,
    "16-mixed": None,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_STATE_NAMES = {"16-mixed": "fp16", "bf16-mixed": "bf16"}

PRECISIONS = tuple(_WEIGHTS)


class _DefaultDtype:
    """New tensors get `dtype` inside; can be entered again and again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


class Precision:
    """One precision on one kind of device.

    Options for a scaler or an autocast that this precision does not have are answered with a warning.

    Args:
        name: one of `PRECISIONS`.
        device: where the step runs.
        scaler_options: arguments of `torch.amp.GradScaler`, such as `init_scale`; `enabled=False` trains without one.
        autocast_options: arguments of `torch.autocast`: `enabled`, `cache_enabled`.

    Raises:
        SettingError: the name is unknown, or `16-mixed` is asked for on a CPU, where float16 autocast has no kernels
            worth the name and would silently train in float32.

    Example:
        >>> Precision("bf16-mixed", torch.device("cpu")).mixed_precision
        'bf16'
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        scaler_options: Mapping[str, Any] | None = None,
        autocast_options: Mapping[str, Any] | None = None,
    ) -> None:
        if name not in _WEIGHTS:
            raise one_of("precision", name, PRECISIONS)
        if name == "16-mixed" and device.type == "cpu":
            raise SettingError(
                "precision='16-mixed' needs a GPU. On a CPU use precision='bf16-mixed' (same speed, no gradient "
                "scaling) or precision='32-true'.",
                field="precision",
                got=name,
            )
        self.name = name
        self.device = device
        self.dtype = _WEIGHTS[name]
        """The dtype of weights and floating inputs, or None to leave them as the user made them."""
        for what, options, precisions in (
            ("gradient scaler", scaler_options, ("16-mixed",)),
            ("autocast", autocast_options, tuple(_AUTOCAST)),
        ):
            if options and name not in precisions:
                warnings.warn(
                    f"the {what} options {dict(options)} have no effect: precision={name!r} has no {what} "
                    f"({' and '.join(precisions)} have)",
                    stacklevel=2,
                )
        scaling = dict(scaler_options or {})
        scales = name == "16-mixed" and scaling.pop("enabled", True)
        self.scaler = torch.amp.GradScaler(device.type, **scaling) if scales else None
        self._autocast_options = dict(autocast_options or {})

    @property
    def mixed_precision(self) -> str:
        """What `AcceleratorState.mixed_precision` says: `no`, `fp16` or `bf16`."""
        return _STATE_NAMES.get(self.name, "no")

    def convert_module(self, module: nn.Module) -> None:
        """Give the module's floating parameters and buffers this precision's dtype, in place."""
        if self.dtype is not None:
            module.to(dtype=self.dtype)

    def input_converter(self) -> Callable[[Any], Any] | None:
        """What turns a batch's floating tensors into the weights' dtype, or None where nothing is to be done."""
        if self.dtype is None:
            return None
        dtype = self.dtype

        def convert(batch: T) -> T:
            return map_leaves(lambda t: t.to(dtype) if torch.is_tensor(t) and t.is_floating_point() else t, batch)

        return convert

    def context(self, autocast_options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any] | None:
        """A context for the forward pass that can be entered once per step, or None where there is nothing to enter.

        Args:
            autocast_options: instead of the ones this precision was made with.
        """
        if self.name in _AUTOCAST:
            options = self._autocast_options if autocast_options is None else autocast_options
            return torch.autocast(self.device.type, dtype=_AUTOCAST[self.name], **options)
        return None if self.dtype is None else _DefaultDtype(self.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)
