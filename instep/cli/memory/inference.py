"""Estimate the memory of a loaded model, counted in the same way as for device maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from instep.big_models import init_empty_weights
from instep.big_models.quantization import BnbQuantizationConfig, chosen_layers
from instep.big_models.sizes import compute_module_sizes, dtype_byte_size, largest_layers
from instep.cli.memory.simulate import users_code
from instep.cli.memory.subject import Subject
from instep.errors import SettingError

_REST = "bfloat16"  # dtype of weights that are not quantized


@dataclass(frozen=True)
class Loaded:
    """Memory of a model that is loaded in one dtype, in bytes.

    Args:
        dtype: name of the dtype.
        weights: bytes of all parameters and buffers; None if the dtype needs quantization, and no layer can be
            quantized.
        largest_layer: bytes of the largest block that is not split over devices, or of a larger single layer. The
            device that computes needs this memory even if all weights are offloaded. None if `weights` is None.
    """

    dtype: str
    weights: int | None
    largest_layer: int | None


def loaded_sizes(subject: Subject, dtypes: Sequence[str]) -> list[Loaded]:
    """Count the bytes of a loaded model in each of several dtypes; no weights are made or read.

    Args:
        subject: the model to load.
        dtypes: names of torch's dtypes, or "nf4" and "fp4". For a dtype of at most one byte, the linear layers that
            `load_and_quantize_model` quantizes have this dtype, and all other weights are bfloat16.

    Raises:
        SettingError: a dtype is unknown.
        UsageError: the model cannot be built.
    """
    with users_code(f"making {subject.name}", "Give its arguments by --args."), init_empty_weights():
        model: Any = subject.make()
    # A transformers model lists the classes of blocks that are not split.
    if hasattr(getattr(model, "model", None), "_no_split_modules"):
        model = model.model
    whole = getattr(model, "_no_split_modules", None) or ()

    def count(name: str) -> Loaded:
        dtype, quantized = name, None
        if dtype_byte_size(name) <= 1:
            try:
                layers = chosen_layers(model, BnbQuantizationConfig(load_in_8bit=True))
            except SettingError:
                return Loaded(name, None, None)
            dtype, quantized = _REST, dict.fromkeys((f"{layer}.weight" for layer in layers), name)
        sizes = compute_module_sizes(model, dtype, quantized)
        return Loaded(name, sizes[""], largest_layers(model, sizes, whole)[""])

    return [count(name) for name in dtypes]
