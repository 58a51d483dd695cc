"""`Precision`: the dtype of the weights, the dtype in which a step computes, and the gradient scaler.

The precision is independent of the strategy. A `Precision` object casts the module once, makes the autocast context for
the step (or None), and has the gradient scaler. A strategy that casts or scales itself calls `without`, which returns a
copy without autocast or scaler.

    name          weights    step computes in                           gradient scaler
    32-true       float32    float32                                    no
    64-true       float64    float64                                    no
    bf16-mixed    float32    autocast to bfloat16                       no
    16-mixed      float32    autocast to float16                        yes (not on a CPU)
    bf16-true     bfloat16   bfloat16                                   no
    16-true       float16    float16                                    no
    fp8           float32    autocast to bfloat16, linear layers in     no
                             float8 (emulated on a CPU)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from instep.distributed.nested import map_leaves
from instep.errors import SettingError, one_of
from instep.utils.checks import choice
from instep.utils.imports import require
from instep.utils.warn import warn_user

T = TypeVar("T")

_WEIGHTS = {
    "32-true": None,
    "bf16-mixed": None,
    "16-mixed": None,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "fp8": None,
}
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "fp8": torch.bfloat16}
_STATE_NAMES = {"16-mixed": "fp16", "bf16-mixed": "bf16", "fp8": "fp8"}
_ALIASES = {
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
    "fp16-true": "16-true",
    "no": "32-true",  # the value of `Accelerator(mixed_precision=)` that means float32
}

PRECISIONS = tuple(_WEIGHTS)
"""Names of precisions that `Trainer(precision=...)` takes, without the short forms."""
_FP8_MULTIPLE = 16  # float8 matrix products need layers whose sizes are multiples of this


class _DefaultDtype:
    """Context manager that sets torch's default dtype; it can be entered again and again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._before)


def precision_name(field: str, value: Any) -> str:
    """Return the name of a precision in `PRECISIONS` for its name or a short form: 32, "16", "bf16", "fp16", "no" ...

    Args:
        field: name of the setting, for the error message.
        value: value of the setting.

    Raises:
        SettingError: the value is not a precision.

    Example:
        >>> precision_name("precision", "bf16")
        'bf16-mixed'
    """
    name = "" if isinstance(value, bool) else str(value)
    name = _ALIASES.get(name, name)
    if name not in PRECISIONS:
        raise one_of(field, value, (*PRECISIONS, *_ALIASES))
    return name


def check_device(name: str, device: torch.device) -> None:
    """Check that a device can compute in a precision.

    Args:
        name: one of `PRECISIONS`.
        device: device on which the step runs.

    Raises:
        SettingError: the device does not support the precision.
        MissingPackageError: the precision is fp8, and torchao is not installed.
    """
    if name == "16-mixed" and device.type == "cpu":
        raise SettingError(
            "precision='16-mixed' ('16', 'fp16') needs a GPU. On a CPU use precision='bf16-mixed' (same speed, no "
            "gradient scaling) or precision='32-true'.",
            field="precision",
            got=name,
        )
    if name == "fp8":
        require("torchao.float8", extra="quant", purpose="precision='fp8'")
        native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        if not native and device.type != "cpu":
            raise SettingError(
                f"precision='fp8' needs a CUDA device of capability 8.9 or newer (Ada, Hopper), and {device} "
                "is none; on a CPU it is emulated. Use precision='bf16-mixed'.",
                field="precision",
                got=name,
            )
    dtype = _compute_dtype(name)
    # Try whether the device computes in this dtype. XLA supports all dtypes, and is not imported yet.
    if dtype is not None and device.type != "xla":
        try:
            one = torch.ones(2, 2, dtype=dtype, device=device)
            torch.mm(one, one)
        except (RuntimeError, TypeError) as error:
            raise SettingError(
                f"precision={name!r} computes in {str(dtype)[6:]}, which {device} cannot: "
                f"{str(error).splitlines()[0]}. Use precision='32-true'.",
                field="precision",
                got=name,
            ) from error


def _compute_dtype(name: str) -> torch.dtype | None:
    return _AUTOCAST.get(name, _WEIGHTS[name])


class Precision:
    """A precision for one type of device.

    If there are options for a scaler or for autocast that this precision does not use, the constructor warns.

    Args:
        name: one of `PRECISIONS`.
        device: device on which the step runs.
        scaler_options: arguments of `torch.amp.GradScaler`, such as `init_scale`; with `enabled=False` there is no
            scaler.
        autocast_options: arguments of `torch.autocast`: `enabled`, `cache_enabled`.

    Raises:
        SettingError: the name is unknown; the device cannot compute in this precision; or `16-mixed` is requested on a
            CPU, where float16 autocast would silently train in float32.
        MissingPackageError: fp8 is requested without torchao.

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
        choice(*PRECISIONS)("precision", name)
        check_device(name, device)
        self.name = name
        self.device = device
        self.dtype = _WEIGHTS[name]
        """The dtype of weights and floating inputs, or None to leave them as the user made them."""
        self.compute_dtype = _compute_dtype(name)
        """The dtype of matrix products, or None for the dtype of the weights."""
        for what, options, precisions in (
            ("gradient scaler", scaler_options, ("16-mixed",)),
            ("autocast", autocast_options, tuple(_AUTOCAST)),
        ):
            if options and name not in precisions:
                warn_user(
                    f"the {what} options {dict(options)} have no effect: precision={name!r} has no {what} "
                    f"({' and '.join(precisions)} have)"
                )
        scaling = dict(scaler_options or {})
        scales = name == "16-mixed" and scaling.pop("enabled", True)
        self.scaler = torch.amp.GradScaler(device.type, **scaling) if scales else None
        self._autocast = name in _AUTOCAST
        self._autocast_options = dict(autocast_options or {})

    @property
    def mixed_precision(self) -> str:
        """The value of `AcceleratorState.mixed_precision` for this precision: "no", "fp16", "bf16" or "fp8"."""
        return _STATE_NAMES.get(self.name, "no")

    def without(self, *, autocast: bool = False, scaler: bool = False) -> Precision:
        """Return a copy without autocast or without the scaler, for a strategy that casts or scales itself.

        The `connect` of the strategy passes the copy to `Strategy.connect`, which stores it as `precision`.

        Args:
            autocast: True: no autocast, since the strategy casts to `compute_dtype` itself.
            scaler: True: no scaler, since the strategy scales float16 gradients itself.
        """
        other = copy.copy(self)
        other._autocast = self._autocast and not autocast
        other.scaler = None if scaler else self.scaler
        return other

    def convert_module(self, module: nn.Module) -> None:
        """Cast the module's floating-point parameters and buffers to this precision's dtype, in place.

        Complex tensors stay complex. With fp8, linear layers are replaced by torchao's, which have the same parameters
        under the same names. This is done for all layers whose sizes are multiples of 16, except the last layer, which
        makes the outputs of the model. For other layers or scaling recipes, call torchao's `convert_to_float8_training`
        in `configure_model`, and use bf16-mixed.
        """
        if self.dtype is not None:
            from instep.utils.dtypes import cast_module  # imported late: rarely used

            cast_module(module, self.dtype)
        if self.name == "fp8":
            _compute_in_float8(module, emulate=self.device.type == "cpu")

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that casts a batch's floating-point tensors to the weights' dtype; None if not needed."""
        if self.dtype is None:
            return None
        dtype = self.dtype

        def convert(batch: T) -> T:
            return map_leaves(lambda t: t.to(dtype) if torch.is_tensor(t) and t.is_floating_point() else t, batch)

        return convert

    def context(self, autocast_options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any] | None:
        """Return a context for the forward pass (autocast or a default dtype), to be entered in each step; or None.

        Args:
            autocast_options: options to use in place of those from the constructor.
        """
        if self._autocast:
            options = self._autocast_options if autocast_options is None else autocast_options
            return torch.autocast(self.device.type, dtype=self.compute_dtype, **options)
        return None if self.dtype is None else _DefaultDtype(self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the gradient scaler's state; {} if there is no scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict` into the gradient scaler; do nothing without a scaler."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


def _compute_in_float8(module: nn.Module, emulate: bool) -> None:
    # Imported late: optional, and slow to import
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = [(name, layer) for name, layer in module.named_modules() if type(layer) is nn.Linear]
    fitting = {
        name
        for name, layer in layers[:-1]
        if layer.in_features % _FP8_MULTIPLE == layer.out_features % _FP8_MULTIPLE == 0
    }
    if not fitting and not any(type(layer).__name__ == "Float8Linear" for layer in module.modules()):
        raise SettingError(
            f"precision='fp8' finds no layer to compute in float8 in {type(module).__name__}: of its {len(layers)} "
            f"linear layers none but the last has sizes that divide by {_FP8_MULTIPLE}. Use precision='bf16-mixed'.",
            field="precision",
            got="fp8",
        )
    convert_to_float8_training(
        module, config=Float8LinearConfig(emulate=emulate), module_filter_fn=lambda layer, name: name in fitting
    )


def check_tf32(tf32: bool | None, device: torch.device) -> None:
    """Raise a `SettingError` if TF32 is requested for a device that does not support it."""
    if tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise SettingError(
            f"tf32=True needs a CUDA device of capability 8.0 or newer (Ampere), and {device} is none. Leave it out.",
            field="tf32",
            got=tf32,
        )


@contextmanager
def float32_products(tf32: bool | None, device: torch.device) -> Iterator[None]:
    """Choose for the `with` block whether float32 matrix products and convolutions use TF32.

    Args:
        tf32: True: use TF32. False: full precision. None: keep the program's setting.
        device: device that computes.

    Raises:
        SettingError: the device does not support TF32, or the program uses torch's `fp32_precision` settings, which
            cannot be combined with this one.
    """
    if tf32 is None:
        yield
        return
    check_tf32(tf32, device)
    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError as error:
        raise SettingError(
            f"tf32={tf32} cannot be used beside torch's fp32_precision switches, which this program has set: "
            f"{str(error).splitlines()[0]}. Use one of them.",
            field="tf32",
            got=tf32,
        ) from error
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
