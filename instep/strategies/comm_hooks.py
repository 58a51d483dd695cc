"""`CommHook`: how DDP communicates gradients: unchanged, rounded to 16 bits, or compressed by PowerSGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from instep.errors import SettingError
from instep.utils.checks import choice

COMM_HOOKS = ("no", "fp16", "bf16", "power_sgd", "post_local_sgd")

Hook = Callable[..., Any]


@dataclass(frozen=True)
class CommHook:
    """A communication hook of DDP with its options, which the constructor checks.

    Args:
        name: one of `COMM_HOOKS`, such as "bf16" or "power_sgd".
        wrapper: dtype to which gradients are rounded before PowerSGD: "no", "fp16" or "bf16".
        state: arguments of torch's `PowerSGDState` for "power_sgd", or of `LocalSGDPlan` for "post_local_sgd".
    """

    name: str = "no"
    wrapper: str = "no"
    state: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "batched_power_sgd":
            raise SettingError(
                "comm_hook='batched_power_sgd': torch's hook of this name fails at the first step that it compresses. "
                "Use comm_hook='power_sgd', with comm_state={'batch_tensors_with_same_shape': True} for the speed.",
                field="comm_hook",
                got=self.name,
            )
        choice(*COMM_HOOKS)("comm_hook", self.name)
        choice("no", "fp16", "bf16")("comm_wrapper", self.wrapper)
        wrapped = self.wrapper != "no" and self.wrapper
        for name, value, owners in (
            ("comm_wrapper", wrapped, ("power_sgd",)),
            ("comm_state", self.state, ("power_sgd", "post_local_sgd")),
        ):
            if value and self.name not in owners:
                raise SettingError(
                    f"{name}={value!r} belongs to comm_hook={' or '.join(map(repr, owners))}, and this is "
                    f"comm_hook={self.name!r}. Choose that hook, or leave {name} out.",
                    field=name,
                    got=value,
                )
        if self.name == "power_sgd":
            self._power_state()

    def register(self, ddp: DistributedDataParallel) -> None:
        """Register the hook in a DDP module; `PostLocalSGD` registers the hook "post_local_sgd" itself."""
        # Imported late: only needed if gradients are compressed.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        if self.name in ("fp16", "bf16"):
            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            ddp.register_comm_hook(None, _under_own_name(hooks[self.name]))
        elif self.name == "power_sgd":
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

            wrappers = {"fp16": default_hooks.fp16_compress_wrapper, "bf16": default_hooks.bf16_compress_wrapper}
            hook: Hook = powerSGD_hook if self.wrapper == "no" else wrappers[self.wrapper](powerSGD_hook)
            hook = _one_bucket_at_a_time(hook) if ddp.device.type == "cpu" else hook
            ddp.register_comm_hook(self._power_state(), _under_own_name(hook))

    def _power_state(self) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState  # imported late: few use it

        try:
            return PowerSGDState(process_group=None, **self.state)
        except (TypeError, ValueError) as error:
            raise SettingError(
                f"comm_state={dict(self.state)!r} cannot be used: {error}. It takes the arguments of torch's "
                "PowerSGDState, such as {'matrix_approximation_rank': 2}.",
                field="comm_state",
                got=self.state,
            ) from error


def _under_own_name(hook: Hook) -> Hook:
    """Wrap a hook in a function of another name.

    Without NCCL, DDP refuses torch's bfloat16 hooks by their names, although gloo can sum bfloat16 too.
    """

    def travel(state, bucket):  # not annotated: DDP checks annotations, which would be strings in this file
        return hook(state, bucket)

    return travel


def _one_bucket_at_a_time(hook: Hook) -> Hook:
    """Make a hook process one gradient bucket after the other, which PowerSGD needs with gloo.

    PowerSGD starts further collectives in the callbacks of its collectives, and gloo runs these callbacks in several
    threads. With two buckets at the same time, ranks could match collectives of different buckets and crash.
    """

    @wraps(hook)
    def waiting(state, bucket):  # not annotated: DDP checks annotations, which would be strings in this file
        future = hook(state, bucket)
        future.wait()
        return future

    return waiting


def mean_of(bucket: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.futures.Future[Any]:
    """Start to average a bucket over a process group (None: all ranks); return a future of the mean."""
    world = torch.distributed.get_world_size(group)
    work = torch.distributed.all_reduce(bucket.div_(world), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
