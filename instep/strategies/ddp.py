"""Data parallelism with a replica per process, over torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.distributed import broadcast
from instep.errors import DistributedError
from instep.state import read_environment
from instep.strategies.base import Strategy


class _StepForward(nn.Module):
    """Sends DDP's `forward` to a named step method.

    DDP arms its reducer in `forward`; a step method called directly would leave each rank with gradients of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, name: str, *args: Any) -> Any:
        return getattr(self.module, name)(*args)


def _share_weights(module: nn.Module) -> None:
    """The first rank's weights on every rank, as DDP does for training: one model is evaluated, not one per rank."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(broadcast(tensor))


class DDPStrategy(Strategy):
    """`DistributedDataParallel`: gradients are averaged over processes during the backward.

    Args:
        find_unused_parameters: search, in each step, for parameters that took no part. None: only in manual
            optimization, where one backward seldom reaches all parameters (a GAN's two halves).
        **ddp_options: other arguments of `torch.nn.parallel.DistributedDataParallel`, such as `bucket_cap_mb`,
            `static_graph`, `gradient_as_bucket_view`, `broadcast_buffers`.

    Example:
        >>> DDPStrategy(gradient_as_bucket_view=True).name
        'ddp'
    """

    name = "ddp"
    multi_process = True

    def __init__(self, find_unused_parameters: bool | None = None, **ddp_options: Any) -> None:
        self.find_unused_parameters = find_unused_parameters
        self.ddp_options = ddp_options
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._manual = False
        self._syncs = True

    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._manual = not getattr(module, "automatic_optimization", True)
        trains = any(p.requires_grad for p in module.parameters())
        if not torch.distributed.is_initialized():
            world_size = read_environment().world_size
            if world_size > 1:
                raise DistributedError(
                    f"this process is one of {world_size}, but their process group is gone, so that each would train "
                    "by itself. Leave it alone until the run has ended: something called destroy_process_group()."
                )
            return
        if not optimizers or not trains:
            _share_weights(module)
            return
        unused = self._manual if self.find_unused_parameters is None else self.find_unused_parameters
        device_ids = None if self.device.type == "cpu" else [self.device]
        self._ddp = nn.parallel.DistributedDataParallel(
            _StepForward(module), device_ids=device_ids, find_unused_parameters=unused, **self.ddp_options
        )

    def teardown(self) -> None:
        self._ddp = None

    def step_function(self, name: str) -> Callable[..., Any]:
        ddp = self._ddp
        if ddp is None or name != "training_step":
            return super().step_function(name)
        if not self._manual:
            return lambda *args: ddp(name, *args)

        def manual_step(*args: Any) -> Any:
            # Backward runs inside the step: forward must not arm the reducer, before or after it; each backward does
            # (prepare_backward).
            ddp.require_backward_grad_sync = False
            try:
                return ddp(name, *args)
            finally:
                ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True

        return manual_step

    def prepare_backward(self, loss: Tensor) -> None:
        ddp = self._ddp
        if ddp is None or not self._manual or not self._syncs or not torch.is_grad_enabled():
            return
        ddp.reducer.prepare_for_backward([loss] if ddp.find_unused_parameters and not ddp.static_graph else [])

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._ddp is None else self._without_sync(self._ddp)

    @contextmanager
    def _without_sync(self, ddp: nn.parallel.DistributedDataParallel) -> Iterator[None]:
        before, self._syncs = self._syncs, False  # DDP's own flag is down in every manual step
        try:
            with ddp.no_sync():
                yield
        finally:
            self._syncs = before
