"""Fully sharded data parallelism, over torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.distributed import broadcast
from instep.errors import SettingError
from instep.state import PartialState
from instep.strategies.base import Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDPStrategy(Strategy):
    """`fully_shard`: each rank keeps a part of weights, gradients and optimizer states, and gathers a block to use it.

    Args:
        dp_replicate: how many copies of the weights there are; each is spread over `world size / dp_replicate`
            processes in a row (HSDP: shards within a node, copies across nodes).

    Raises:
        SettingError: an option is wrong. When training starts: the number of processes cannot be divided so.

    Example:
        >>> FSDPStrategy(dp_replicate=2).name
        'fsdp'
    """

    name = "fsdp"
    multi_process = True
    sharded = True

    mesh: DeviceMesh

    def __init__(self, *, dp_replicate: int = 1) -> None:
        self.dp_replicate = dp_replicate
        self._roots: list[Any] = []

    # ---- life

    def check_world_size(self, world_size: int) -> None:
        if world_size % self.dp_replicate:
            raise SettingError(
                f"dp_replicate={self.dp_replicate} copies of the weights cannot be spread evenly over {world_size} "
                "processes. Choose a divisor of their number.",
                field="dp_replicate",
                got=self.dp_replicate,
            )

    def connect(self, device: torch.device, precision: Any) -> None:
        super().connect(device, precision)
        self.mesh = self.make_mesh(
            {"dp_replicate": self.dp_replicate, "dp_shard": PartialState().num_processes // self.dp_replicate}
        )

    def make_mesh(self, sizes: dict[str, int]) -> DeviceMesh:
        """A mesh of all processes with named dimensions, the outermost first. Collective."""
        from torch.distributed.device_mesh import init_device_mesh  # late: only who shards pays for it

        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The part of the mesh that weights are sharded over: 1-dim, or 2-dim where there are copies."""
        return self.mesh["dp_replicate", "dp_shard"] if self.dp_replicate > 1 else self.mesh["dp_shard"]

    def place(self, module: nn.Module) -> None:
        self.module = module
        self.precision.convert_module(module)
        self.share_weights(module)
        self.parallelize(module)
        self.shard(module)

    def share_weights(self, module: nn.Module) -> None:
        """Give every rank the first one's weights and buffers, before they are cut. Collective."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.copy_(broadcast(tensor))

    def parallelize(self, module: nn.Module) -> None:
        """Cut the module up over other dimensions of the mesh, before it is sharded over the dp ones."""

    def shard(self, module: nn.Module) -> None:
        """Shard a module over `dp_mesh`, in place, and let its step methods gather what they need. Collective."""
        from torch.distributed.fsdp import fully_shard  # late, as above

        fully_shard(module, mesh=self.dp_mesh)
        self._roots.append(module)
        for name in STEPS:
            if hasattr(module, name):
                self.register_forward(module, name)

    def register_forward(self, module: nn.Module, name: str) -> None:
        """Let a method of a sharded module gather weights as its `forward` does."""
        from torch.distributed.fsdp import register_fsdp_forward_method  # late, as above

        signature = inspect.signature(getattr(type(module), name))
        register_fsdp_forward_method(module, name)
        # torch's wrapper is bound twice, so that its signature would lack the first argument.
        getattr(module, name).__func__.__signature__ = signature

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        return module

    def teardown(self) -> None:
        self._roots.clear()

    # ---- the step

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._local_gradients() if self._roots else nullcontext()

    @contextmanager
    def _local_gradients(self) -> Iterator[None]:
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(sync)
            root.set_is_last_backward(sync)
            root.set_reshard_after_backward(sync)
