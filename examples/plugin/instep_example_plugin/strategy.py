"""A strategy: replicas that average their gradients once per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from instep import Strategy
from instep.distributed import all_reduce_, broadcast


class AveragedGradients(Strategy):
    """Train one replica on each rank, and give all of them the mean of their gradients."""

    name = "averaged_gradients"
    multi_process = True
    _averages = True

    def prepare_training(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let all ranks go on from the first one's weights."""
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.copy_(broadcast(tensor))

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backpropagate, and average the gradients at the last micro-batch of a window."""
        super().backward(loss, *args, **kwargs)
        if self._averages:
            for parameter in filter(lambda each: each.requires_grad, self.module.parameters()):
                if parameter.grad is None:  # no loss of this rank has reached it; other ranks wait for its part
                    parameter.grad = torch.zeros_like(parameter)
                all_reduce_(parameter.grad, "mean")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for all micro-batches of a window but the last one."""
        self._averages = False
        try:
            yield
        finally:
            self._averages = True
