"""Counting the bytes of tensors that live."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves


class Bytes(TorchDispatchMode):
    """Inside, the bytes of all tensors that were made inside and are not gone yet, and the most of them at a time.

    Beside what operators return, it sees storages being resized, which is how FSDP lets go of what it gathered. What an
    operator needs while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._aside = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, what is made is not counted."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def __enter__(self) -> Any:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_see(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_see  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(it) for it in types):
            return NotImplemented  # a DTensor's own operators come here again with the tensors that it is made of
        result = func(*args, **(kwargs or {}))
        for leaf in () if self._aside else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._gone, key)
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
