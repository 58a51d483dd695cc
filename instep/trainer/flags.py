"""The Trainer's switches of torch, which are the process's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from instep.trainer.settings import Settings


@contextmanager
def torch_flags(settings: Settings) -> Iterator[None]:
    """Set them for a run, and put them back after it."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, anomaly = torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
    if settings.benchmark is not None:
        torch.backends.cudnn.benchmark = settings.benchmark
    if settings.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.autograd.set_detect_anomaly(anomaly)
        torch.set_grad_enabled(grad)
