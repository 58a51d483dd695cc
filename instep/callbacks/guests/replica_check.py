"""`ReplicaCheck`: check during training that all ranks hold the same parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from instep.callbacks.base import Callback
from instep.distributed.replicas import ReplicaDifference, compare_replicas
from instep.errors import DistributedError, SettingError
from instep.utils.checks import at_least, choice
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


class ReplicaCheck(Callback):
    """Compare the parameters of ranks that should hold the same ones, and name the ranks whose parameters differ.

    The copies of a model become different when a rank skips an update, when memory or a device is faulty, or when a
    program changes weights on one rank only. The loss shows such a difference late or never. Each check hashes all
    parameters of this rank; a CPU hashes several GB per second. Shards are compared if several ranks hold the same one.

    Args:
        every_n_steps: number of optimizer steps between two checks; there is also a check at the end of training.
        buffers: compare buffers as well. The buffers of BatchNorm layers usually differ between ranks.
        on_difference: "stop": raise a DistributedError on all ranks. "warn": warn and continue.

    Raises:
        SettingError: an argument is wrong, or the strategy allows different weights on the ranks (local SGD).
        DistributedError: parameters differ; it is raised on all ranks and names tensors, ranks and hosts.

    Example:
        >>> ReplicaCheck(every_n_steps=500).every_n_steps
        500
    """

    def __init__(
        self, every_n_steps: int = 1000, buffers: bool = False, on_difference: Literal["stop", "warn"] = "stop"
    ) -> None:
        self.every_n_steps = at_least(1)("every_n_steps", every_n_steps)
        self.buffers = buffers
        self.on_difference = choice("stop", "warn")("on_difference", on_difference)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.strategy.replicas_diverge:
            raise SettingError(
                "ReplicaCheck compares replicas after every so many steps, but this strategy trains them apart (local "
                "SGD): leave the callback out."
            )
        self._checked_step = 0

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._checked_step:
            self.look(trainer, module)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step != self._checked_step:
            self.look(trainer, module)

    def look(self, trainer: Trainer, module: TrainModule) -> None:
        """Compare the parameters of all ranks now. Collective: all ranks call it."""
        self._checked_step = trainer.global_step
        tensors = dict(module.named_parameters())
        if self.buffers:
            tensors |= dict(module.named_buffers())
        differences = compare_replicas(tensors)
        if not differences:
            return
        text = _text(differences, trainer.global_step, len(tensors))
        if self.on_difference == "stop":
            raise DistributedError(f"{text} The newest checkpoint before it is the one to go on from.")
        if trainer.is_global_zero:
            warn_user(text)


def _text(differences: list[ReplicaDifference], step: int, count: int) -> str:
    hosts = {rank: host for one in differences for rank, host in zip(one.ranks, one.hosts, strict=True)}
    who = ", ".join(f"rank {rank} (on {host})" for rank, host in sorted(hosts.items()))
    names = ", ".join(difference.name for difference in differences[:3])
    more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
    return f"replicas differ after step {step}: {who}, in {len(differences)} of {count} tensors: {names}{more}."
