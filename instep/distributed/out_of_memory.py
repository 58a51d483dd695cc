"""Out-of-memory errors: recognizing them, and releasing the memory that torch caches."""

from __future__ import annotations

import gc

import torch

from instep.state import DEVICE_KINDS

# Texts that show an out-of-memory error: for allocators without an exception class, and for remote errors, of which
# only the text is known.
_OUT_OF_MEMORY = (
    "out of memory",  # part of the error texts of CUDA, XPU, MPS and NPU
    "OutOfMemoryError",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error if its workspace does not fit into memory
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that memory ran out, on a device or host, on this rank or another one.

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
    """Release the accelerator memory that torch caches. Do nothing without an accelerator.

    Args:
        garbage_collection: whether to run Python's garbage collector first, since reference cycles may hold tensors.

    Example:
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for name in ("cuda", "xpu", "npu", "mps"):
        if DEVICE_KINDS[name].count():
            getattr(torch, name).empty_cache()
