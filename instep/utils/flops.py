"""Count floating-point operations, and look up the peak operations per second of devices, for MFU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COLUMNS = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")

# Peak of dense matrix products in 1e12 operations per second, from the makers' data sheets (which give twice as much if
# they count structured sparsity). 0: not supported by the device, or not published. For consumer GPUs: with
# accumulation in float32. The first entry whose words are all in the device's name is used.
_PEAKS: dict[str, tuple[float, ...]] = {
    "gb200": (40, 80, 1250, 2500, 2500, 5000),
    "b200": (37, 75, 1125, 2250, 2250, 4500),
    "gh200": (34, 67, 494.5, 989.5, 989.5, 1979),
    "h200 nvl": (30, 60, 417.5, 835.5, 835.5, 1671),
    "h200": (34, 67, 494.5, 989.5, 989.5, 1979),
    "h100 nvl": (30, 60, 417.5, 835.5, 835.5, 1671),
    "h100 pcie": (26, 51, 378, 756, 756, 1513),
    "h100": (34, 67, 494.5, 989.5, 989.5, 1979),
    "h800": (1, 67, 494.5, 989.5, 989.5, 1979),
    "h20": (1, 44, 74, 148, 148, 296),
    "a100": (9.7, 19.5, 156, 312, 312, 0),
    "a800": (9.7, 19.5, 156, 312, 312, 0),
    "a6000": (0, 38.7, 77.4, 154.8, 154.8, 0),
    "a40": (0, 37.4, 74.8, 149.7, 149.7, 0),
    "a30": (5.2, 10.3, 82, 165, 165, 0),
    "a10g": (0, 31.5, 35, 70, 70, 0),
    "a10": (0, 31.2, 62.5, 125, 125, 0),
    "l40s": (0, 91.6, 183, 362, 362, 733),
    "l40": (0, 90.5, 90.5, 181, 181, 362),
    "l4": (0, 30.3, 60, 121, 121, 242),
    "rtx 6000 ada": (0, 91.1, 182.1, 364.2, 364.2, 728.5),
    "rtx 5090": (0, 104.8, 104.8, 209.5, 209.5, 419),
    "rtx 5080": (0, 56.3, 56.3, 112.6, 112.6, 225.1),
    "rtx 4090": (0, 82.6, 82.6, 165.2, 165.2, 330.3),
    "rtx 4080": (0, 48.7, 48.7, 97.5, 97.5, 194.9),
    "rtx 3090 ti": (0, 40, 40, 80, 80, 0),
    "rtx 3090": (0, 35.6, 35.6, 71, 71, 0),
    "rtx 3080 ti": (0, 34.1, 34.1, 68, 68, 0),
    "rtx 3080": (0, 29.8, 29.8, 59.5, 59.5, 0),
    "rtx 3070": (0, 20.3, 20.3, 40.6, 40.6, 0),
    "titan rtx": (0, 16.3, 0, 0, 65.2, 0),
    "rtx 2080 ti": (0, 13.4, 0, 0, 53.8, 0),
    "t4": (0, 8.1, 0, 0, 65, 0),
    "v100s": (8.2, 16.4, 0, 0, 130, 0),
    "v100 sxm2": (7.8, 15.7, 0, 0, 125, 0),
    "v100": (7, 14, 0, 0, 112, 0),
    "mi355x": (78.6, 157.3, 0, 2500, 2500, 5000),
    "mi325x": (81.7, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
    "mi300x": (81.7, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
    "mi250x": (23.9, 23.9, 0, 191.5, 191.5, 0),  # peak of one of the MI250X's two dies: torch shows each as a device
    "mi210": (22.6, 22.6, 0, 181, 181, 0),
}


class FlopCounter(TorchDispatchMode):
    """Context manager that counts floating-point operations, by the formulas of torch's `FlopCounterMode`.

    `FlopCounterMode` itself is not used, since it decomposes composite operations and adds hooks to every module:
    results may differ in the last bit, and its first use imports torch's compiler, which takes seconds. torch has no
    formula for attention on the CPU, which this class counts like attention on a GPU. Recurrent layers on the CPU are a
    single operation without a formula, and count as 0.

    Attributes:
        counts: number of operations by kind. For a DTensor, this rank's share is counted, as if all shards were equal.

    Example:
        >>> with FlopCounter() as counter:
        ...     _ = torch.nn.Linear(3, 2)(torch.ones(4, 3))
        >>> counter.total
        48
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # imported late: rarely used

        aten = torch.ops.aten
        self.counts: Counter[Any] = Counter()
        self._formulas: dict[Any, Any] = {
            aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
            aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
                aten._scaled_dot_product_flash_attention_backward
            ],
            **flop_registry,
        }

    @property
    def total(self) -> int:
        """Number of operations of all kinds together."""
        return sum(self.counts.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this returned True, as it does by default, torch would wrap `__torch_dispatch__` so that its compiler skips
        # the method. For this, torch imports its compiler at the first operation, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = getattr(func, "_overloadpacket", func)
        formula = self._formulas.get(kind)
        if formula is not None:
            spread = next((arg for arg in args if hasattr(arg, "device_mesh")), None)
            ranks = 1 if spread is None else spread.device_mesh.size()
            self.counts[kind] += formula(*args, **(kwargs or {}), out_val=result) // ranks
        return result


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak floating-point operations per second of a device in dense matrix products.

    Args:
        device: a CUDA (or ROCm) device; there is no table for other devices.
        precision: the precision of a Trainer, such as "bf16-mixed".

    Returns:
        Operations per second; None if the table has no number for the device and the precision.

    Example:
        >>> import torch
        >>> peak_flops(torch.device("cpu"), "32-true") is None
        True
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), _column(precision))


def peak_of(name: str, dtype: str) -> float | None:
    """Look up the peak floating-point operations per second of a device by its name; None if the table has none.

    Args:
        name: name of the device from its driver.
        dtype: "float64", "float32", "tf32", "bfloat16", "float16" or "float8".

    Example:
        >>> peak_of("NVIDIA H100 80GB HBM3", "bfloat16")
        989500000000000.0
    """
    words = name.lower().replace("-", " ").replace("/", " ").split()
    for key, peaks in _PEAKS.items():
        if all(word in words for word in key.split()):
            return peaks[_COLUMNS.index(dtype)] * 1e12 or None
    return None


def _column(precision: str) -> str:
    if precision == "32-true":
        matmul = torch.backends.cuda.matmul
        # Since torch 2.9 there is `fp32_precision`, and reading the older setting may raise an error.
        mode = getattr(matmul, "fp32_precision", None)
        return "tf32" if (matmul.allow_tf32 if mode is None else mode == "tf32") else "float32"
    kind = precision.partition("-")[0]
    return {"64": "float64", "bf16": "bfloat16", "16": "float16", "fp8": "float8"}[kind]
