"""Limit on the memory of new tensors, held before each is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class AllocationLimit(TorchDispatchMode):
    """Context in which new tensors of more than a number of bytes, all of them together, are an error.

    Each operation runs on the meta device first, which takes no memory. What has no form there is not counted. What is
    freed in between is counted all the same.

    Args:
        limit_bytes: of all that is made within the contexts of this object.
        error: makes the error.

    Example:
        >>> with AllocationLimit(1000, lambda: MemoryError("too much")):
        ...     torch.nn.Linear(10**6, 10**6)
        Traceback (most recent call last):
        MemoryError: too much
    """

    def __init__(self, limit_bytes: int, error: Callable[[], Exception]) -> None:
        super().__init__()
        self._left, self._error = limit_bytes, error

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own True loads its compiler, which takes seconds; nothing is compiled in here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(result.alias_info for result in func._schema.returns) and not _on_meta(args, kwargs):
            self._left -= self._bytes_of(func, args, kwargs)
            if self._left < 0:
                raise self._error()
        return func(*args, **kwargs)

    def _bytes_of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        names = {argument.name for argument in func._schema.arguments}
        placed = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
        placed |= {"device": torch.device("meta")} if "device" in names else {}
        try:
            args, placed = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, placed))
            made = func(*args, **placed)
        except Exception as error:
            if "overflow" in str(error):  # of a size that 64 bits do not hold
                raise self._error() from error
            return 0
        return sum(each.numel() * each.element_size() for each in pytree.tree_leaves(made) if isinstance(each, Tensor))


def _on_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    return any(isinstance(each, Tensor) and each.is_meta for each in pytree.tree_leaves((args, dict(kwargs))))
