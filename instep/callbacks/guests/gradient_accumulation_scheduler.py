"""`GradientAccumulationScheduler`: change the number of accumulated micro-batches at given epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from instep.callbacks.base import Callback
from instep.errors import SettingError, UsageError
from instep.utils.checks import is_int

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


class GradientAccumulationScheduler(Callback):
    """Change the number of micro-batches per optimizer step at given epochs.

    `trainer.accumulate_grad_batches` is the current number, and `trainer.estimated_stepping_batches` includes all
    changes. The last optimizer step of an epoch may have fewer micro-batches; its gradients are divided by its own
    number of samples. The number depends on the epoch alone, so that a run resumes exactly. To change the number of
    samples per optimizer step at a step rather than an epoch, use `Trainer(global_batch_size={0: 64, 1000: 256})`,
    which is independent of the number of processes.

    Args:
        scheduling: maps an epoch (counted from 0) to the number of micro-batches per optimizer step from that epoch
            on. Before the first epoch of the dict the number is 1.

    Raises:
        SettingError: `scheduling` is empty, or has an epoch below 0 or a number below 1.

    Example:
        >>> scheduler = GradientAccumulationScheduler({0: 8, 4: 2})  # small steps of the optimizer from the fifth epoch
        >>> [scheduler.get_accumulate_grad_batches(epoch) for epoch in (0, 3, 4, 9)]
        [8, 8, 2, 2]

    Source: Lightning's `GradientAccumulationScheduler`.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        epochs, factors = list(scheduling), list(scheduling.values())
        if not scheduling:
            raise SettingError(
                "scheduling is empty: expected accumulation factors by epoch, such as {0: 8, 4: 2}.",
                field="scheduling",
                got=scheduling,
            )
        if not all(is_int(epoch, 0) for epoch in epochs):
            raise SettingError(
                f"Epoch should be an int greater than or equal to 0. Got {epochs}. Write {{epoch: factor}}, such as "
                "{0: 8, 4: 2}.",
                field="scheduling",
                got=scheduling,
            )
        if not all(is_int(factor, 1) for factor in factors):
            raise SettingError(
                f"Accumulation factor should be an int greater than 0. Got {factors}. 1 turns accumulation off.",
                field="scheduling",
                got=scheduling,
            )
        self.scheduling = dict(sorted({0: 1, **scheduling}.items()))
        self.epochs = list(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return whether any epoch has more than one micro-batch per optimizer step."""
        return any(factor > 1 for factor in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the number of micro-batches per optimizer step in an epoch; epochs count from 0."""
        return self.scheduling[max(begin for begin in self.epochs if begin <= epoch)]

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Check that no other setting changes `accumulate_grad_batches`."""
        if sum(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks) > 1:
            raise SettingError(
                "two GradientAccumulationScheduler callbacks would each set the accumulation. Leave one of them out: "
                "one takes all epochs, such as {0: 8, 4: 2}.",
                field="callbacks",
            )
        if not module.automatic_optimization:
            raise UsageError(
                "Automatic gradient accumulation and the `GradientAccumulationScheduler` have no effect in manual "
                "optimization: leave the callback out and step every N batches in training_step."
            )
        if trainer.global_batch_size is not None:
            raise SettingError(
                f"global_batch_size={trainer.global_batch_size} derives the accumulation, and there is a "
                "GradientAccumulationScheduler too. Use one of them: global_batch_size={0: 64, 1000: 256} grows.",
                field="scheduling",
                got=self.scheduling,
            )
        if trainer.accumulate_grad_batches != 1:
            raise SettingError(
                "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler` callback: "
                f"leave Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) or the callback out.",
                field="accumulate_grad_batches",
                got=trainer.accumulate_grad_batches,
            )

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)
