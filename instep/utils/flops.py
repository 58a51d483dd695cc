"""Counting of floating-point operations by torch's formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of what runs within it, by the formulas of torch's `FlopCounterMode`.

    That class takes composite operations apart and hooks into every module: what runs in it may differ in the last bit
    from what runs without, and its first use loads torch's compiler, which takes seconds. Its formulas leave out
    attention on the CPU, which is counted here like that on a GPU. Recurrent layers on the CPU are one operation
    without a formula, and count 0.

    Attributes:
        counts: operations by kind. Of a DTensor this rank's part is counted, as if the whole were spread evenly.

    Example:
        >>> with FlopCounter() as counter:
        ...     _ = torch.nn.Linear(3, 2)(torch.ones(4, 3))
        >>> counter.total
        48
    """

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # late: few runs count

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
        """Operations of all kinds."""
        return sum(self.counts.values())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler at the first operation, which takes seconds: only to tell it to stay away.
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
