"""FSDP with the option names of Lightning's strategy and of Accelerate's plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from instep.errors import SettingError
from instep.strategies import FSDPStrategy
from instep.utils.warn import warn_user

KINDS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Kinds of sharding in torch's FSDP1, in the order of their numbers; the first number is 1."""
_OTHER_NAMES = {"NONE": "FULL_SHARD", "TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}
_OTHER_NAMES |= {str(number): kind for number, kind in enumerate(KINDS, 1)}
_SO_ANYWAY = {"limit_all_gathers", "process_group_backend", "sync_module_states", "timeout", "use_orig_params"}


class FullyShardedDataParallelPlugin(FSDPStrategy):
    """instep's FSDP (torch's FSDP2) with option names of Lightning and Accelerate; unknown options have no effect."""

    auto_wrap_policy = limit_all_gathers = mixed_precision_policy = ignored_modules = None

    def __init__(
        self,
        auto_wrap_policy: Any = None,
        *,
        transformer_cls_names_to_wrap: str | Sequence[str] | None = None,
        min_num_params: int | None = None,
        activation_checkpointing_policy: Any = None,
        activation_checkpointing: bool = False,
        sharding_strategy: Any = "FULL_SHARD",
        reshard_after_forward: Any = None,
        cpu_offload: Any = False,
        fsdp_version: int = 2,
        state_dict_type: Any = "FULL_STATE_DICT",
        **others: Any,
    ) -> None:
        left = sorted(f"{name}=" for name, value in others.items() if value and name not in _SO_ANYWAY)
        self.fsdp_version, self.state_dict_type = fsdp_version, state_dict_type
        names = transformer_cls_names_to_wrap
        names = names.split(",") if isinstance(names, str) else names
        # Accelerate may pass FSDP1's sharding strategy as `reshard_after_forward`.
        if not isinstance(reshard_after_forward, int | None):
            sharding_strategy, reshard_after_forward = reshard_after_forward, None
        kind = str(sharding_strategy).rpartition(".")[2].upper()
        kind = _OTHER_NAMES.get(kind, kind)
        if kind == "NO_SHARD":
            raise SettingError(
                "FSDP(sharding_strategy='NO_SHARD') has no counterpart in torch's FSDP2: use strategy='ddp', or in a "
                "program of Accelerate no FSDP plugin",
                field="sharding_strategy",
                got=sharding_strategy,
            )
        if kind not in KINDS:
            left.append(f"sharding_strategy={kind!r}")
        if str(auto_wrap_policy).upper() == "NO_WRAP":
            left.append("auto_wrap_policy='NO_WRAP'")
        if left:
            warn_user(f"FSDP({', '.join(left)}) has no effect: instep shards by torch's FSDP2")
        if kind in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
            reshard_after_forward = False
        # A text such as "TRANSFORMER_BASED_WRAP" is no policy: it says which of the other options has the policy.
        policy = None if isinstance(auto_wrap_policy, str) else auto_wrap_policy
        super().__init__(
            names or policy or min_num_params or None,
            cpu_offload=bool(getattr(cpu_offload, "offload_params", cpu_offload)),
            activation_checkpointing=activation_checkpointing_policy or activation_checkpointing,
            reshard_after_forward=reshard_after_forward,
            dp_replicate="auto" if kind.startswith("HYBRID") else 1,
        )
