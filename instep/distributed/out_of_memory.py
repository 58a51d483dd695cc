"""Running out of memory: whether an error says so, and memory given back to the accelerator."""

from __future__ import annotations

import gc

import torch

from instep.state import DEVICE_KINDS

# Texts for allocators without an exception class of their own, and for remote or chained errors of the others.
_OUT_OF_MEMORY = (
    "out of memory",  # the text of CUDA, XPU, MPS and NPU
    "OutOfMemoryError",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error when its workspace does not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a device or host, on this rank or a remote one.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError):
            text = str(seen)
            if any(mark in text for mark in _OUT_OF_MEMORY) or "\nMemoryError" in text:
                return True
        seen = seen.__cause__
    return False


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the memory that torch caches back to the accelerator. Do nothing without an accelerator.

    Args:
        garbage_collection: collect reference cycles first, which may hold tensors.

    Example:
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for name in ("cuda", "xpu", "npu", "mps"):
        if DEVICE_KINDS[name].count():
            getattr(torch, name).empty_cache()
