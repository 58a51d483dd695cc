"""Data parallelism with a replica per process, over torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from instep.distributed import broadcast
from instep.errors import DistributedError, SettingError, one_of
from instep.state import read_environment
from instep.strategies.base import Strategy

_COMM_HOOKS = ("no", "fp16", "bf16", "power_sgd")
_COMM_WRAPPERS = ("no", "fp16", "bf16")


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


def _one_bucket_at_a_time(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook's messages in one order on all ranks, over gloo.

    PowerSGD sends more from the callbacks of what it sent, and gloo runs those in several threads: with two buckets
    under way ranks pair messages of different buckets, and crash.
    """

    @wraps(hook)
    def waiting(state, bucket):  # no annotations: torch compares them with its classes
        future = hook(state, bucket)
        future.wait()
        return future

    return waiting


class DDPStrategy(Strategy):
    """`DistributedDataParallel`: gradients are averaged over processes during the backward.

    Args:
        find_unused_parameters: search, in each step, for parameters that took no part. None: only in manual
            optimization, where one backward seldom reaches all parameters (a GAN's two halves).
        comm_hook: how gradients travel: "no" as they are; "fp16" and "bf16" rounded to 16 bits ("bf16" on GPUs only);
            "power_sgd" as low-rank factors, from step `start_powerSGD_iter` on (1000 by default). What PowerSGD
            remembers between steps is not part of a checkpoint: a resumed run starts it anew.
        comm_wrapper: "fp16" or "bf16": round what PowerSGD gets to 16 bits first.
        comm_state: arguments of torch's `PowerSGDState`, such as `{"matrix_approximation_rank": 2}`.
        **ddp_options: other arguments of `torch.nn.parallel.DistributedDataParallel`, such as `bucket_cap_mb`,
            `static_graph`, `gradient_as_bucket_view`, `broadcast_buffers`.

    Raises:
        SettingError: a hook or a wrapper is unknown, or an option has no hook to belong to. When training starts: the
            hook cannot work on this device, or refuses `comm_state`.

    Example:
        >>> DDPStrategy(gradient_as_bucket_view=True, comm_hook="fp16").name
        'ddp'

    Source:
        Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019 (https://arxiv.org/abs/1905.13727), as built in torch.
    """

    name = "ddp"
    multi_process = True

    def __init__(
        self,
        find_unused_parameters: bool | None = None,
        *,
        comm_hook: str = "no",
        comm_wrapper: str = "no",
        comm_state: Mapping[str, Any] | None = None,
        **ddp_options: Any,
    ) -> None:
        if comm_hook == "batched_power_sgd":
            raise SettingError(
                "comm_hook='batched_power_sgd': torch's hook of this name fails at the first step that it compresses. "
                "Use comm_hook='power_sgd', with comm_state={'batch_tensors_with_same_shape': True} for the speed.",
                field="comm_hook",
                got=comm_hook,
            )
        if comm_hook not in _COMM_HOOKS:
            raise one_of("comm_hook", comm_hook, _COMM_HOOKS)
        if comm_wrapper not in _COMM_WRAPPERS:
            raise one_of("comm_wrapper", comm_wrapper, _COMM_WRAPPERS)
        for field, value in (("comm_wrapper", comm_wrapper != "no" and comm_wrapper), ("comm_state", comm_state)):
            if value and comm_hook != "power_sgd":
                raise SettingError(
                    f"{field}={value!r} belongs to comm_hook='power_sgd', and this is comm_hook={comm_hook!r}. Choose "
                    f"that hook, or leave {field} out.",
                    field=field,
                    got=value,
                )
        self.find_unused_parameters = find_unused_parameters
        self.comm_hook = comm_hook
        self.comm_wrapper = comm_wrapper
        self.comm_state = dict(comm_state or {})
        self.ddp_options = ddp_options
        self._ddp: DistributedDataParallel | None = None
        self._manual = False
        self._syncs = True

    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._manual = not getattr(module, "automatic_optimization", True)
        if self._spreads(module, trains=bool(optimizers)):
            self._ddp = self._distribute(_StepForward(module), unused=self._manual)

    def wrap(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        if not self._spreads(module, trains=True):
            return module
        self._ddp = self._distribute(module, unused=False)
        return self._ddp

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def _spreads(self, module: nn.Module, trains: bool) -> bool:
        """Whether there is anybody to average gradients with; a module without gradients gets rank 0's weights."""
        if not torch.distributed.is_initialized():
            world_size = read_environment().world_size
            if world_size > 1:
                raise DistributedError(
                    f"this process is one of {world_size}, but their process group is gone, so that each would train "
                    "by itself. Leave it alone until the run has ended: something called destroy_process_group()."
                )
            return False
        if trains and any(p.requires_grad for p in module.parameters()):
            return True
        _share_weights(module)
        return False

    def _distribute(self, module: nn.Module, unused: bool) -> DistributedDataParallel:
        ddp = DistributedDataParallel(
            module,
            device_ids=None if self.device.type == "cpu" else [self.device],
            find_unused_parameters=unused if self.find_unused_parameters is None else self.find_unused_parameters,
            **self.ddp_options,
        )
        if self.comm_hook != "no":
            self._register_hook(ddp)
        return ddp

    def _register_hook(self, ddp: DistributedDataParallel) -> None:
        # Imported late: few runs compress their gradients.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[str, Callable[..., Any]] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
        }
        wrappers = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}
        hook = hooks[self.comm_hook]
        state: Any = None
        try:
            if self.comm_hook == "power_sgd":
                state = powerSGD_hook.PowerSGDState(process_group=None, **self.comm_state)
                hook = wrappers[self.comm_wrapper](hook) if self.comm_wrapper != "no" else hook
                hook = _one_bucket_at_a_time(hook) if self.device.type == "cpu" else hook
            ddp.register_comm_hook(state, hook)
        except (TypeError, ValueError) as error:
            raise SettingError(
                f"comm_hook={self.comm_hook!r} with comm_wrapper={self.comm_wrapper!r} and "
                f"comm_state={self.comm_state!r} cannot be used on device {self.device}: {error}. Use comm_hook='fp16' "
                "on a CPU; the arguments of comm_state are those of torch's PowerSGDState.",
                field="comm_hook",
                got=self.comm_hook,
            ) from error

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
    def _without_sync(self, ddp: DistributedDataParallel) -> Iterator[None]:
        before, self._syncs = self._syncs, False  # DDP's own flag is down in every manual step
        try:
            with ddp.no_sync():
                yield
        finally:
            self._syncs = before
