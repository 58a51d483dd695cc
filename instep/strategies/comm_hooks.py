"""Communication hooks of DDP: gradients as they are, rounded to 16 bits, or as low-rank factors."""

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
    """A way to communicate gradients. Every option is checked in the constructor.

    Args:
        name: one of `COMM_HOOKS`.
        wrapper: "no", or the 16-bit dtype that PowerSGD's input is rounded to.
        state: arguments of torch's `PowerSGDState`, or of `LocalSGDPlan`.
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
        """Register the hook in a DDP. The hook "post_local_sgd" is registered by `PostLocalSGD`."""
        # Imported late, since few runs compress their gradients.
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
    """Give a hook another name, since DDP refuses torch's bfloat16 hooks without NCCL.

    gloo can sum bfloat16 too.
    """

    def travel(state, bucket):  # without annotations: torch compares them with classes, and in this file they are texts
        return hook(state, bucket)

    return travel


def _one_bucket_at_a_time(hook: Hook) -> Hook:
    """Keep the messages of a hook in the same order on all ranks, for gloo.

    PowerSGD sends further messages from the callbacks of its messages, and gloo runs these callbacks in several
    threads. With two buckets at the same time, ranks would pair messages of different buckets and crash.
    """

    @wraps(hook)
    def waiting(state, bucket):  # without annotations, which torch compares with classes
        future = hook(state, bucket)
        future.wait()
        return future

    return waiting


def mean_of(bucket: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> torch.futures.Future[Any]:
    """Return the mean of a bucket over a group; over all ranks if no group is given."""
    world = torch.distributed.get_world_size(group)
    work = torch.distributed.all_reduce(bucket.div_(world), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
