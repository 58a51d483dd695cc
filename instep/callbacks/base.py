"""The base class of callbacks: every hook of the four paths, doing nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from instep.trainer import Trainer, TrainModule


class Callback:
    """Code that runs at fixed points of a run, apart from the model.

    Override the hooks you need. The Trainer looks once, before the loop, which ones are overridden, so a hook that is
    not overridden costs nothing per step. Names, order and arguments are those that users of Lightning know; every hook
    runs on every rank, in the order of `Trainer(callbacks=[...])`.

    What a callback must remember over a restart goes through `state_dict` and `load_state_dict`: tensors and JSON
    values only. Two callbacks of one class that both keep state need different `state_key`s.

    A callback ends the training by `trainer.set_trigger("stop", reason="...")`, on whatever rank knows: all ranks leave
    the loop at the same step.

    Example:
        >>> class CountBatches(Callback):
        ...     def __init__(self):
        ...         self.batches = 0
        ...
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         self.batches += 1
        ...
        ...     def state_dict(self):
        ...         return {"batches": self.batches}
        ...
        ...     def load_state_dict(self, state_dict):
        ...         self.batches = state_dict["batches"]
        >>> CountBatches().state_key
        'CountBatches'
    """

    monitoring: bool = False
    """True: `on_train_epoch_end` and `on_validation_end` run after the module's own, whose metrics they watch."""

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: the class's name unless overridden."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What to keep over a restart: tensors and JSON values. Called on every rank, rank 0's is written."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave. Not called if the checkpoint has no state for this key."""

    # ---- the run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """First of all, with `stage` one of "fit", "validate", "test", "predict"."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Last of all."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """The run ends by this exception, a KeyboardInterrupt among them."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be written: keys may be added to it, of tensors and JSON values."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read: the added keys are there again."""

    # ---- fit

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Fit begins: the model is set up and on its device."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Fit ends, before teardown."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """A few validation batches are run before training."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """The sanity check is over."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Training begins."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Training ends."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """An epoch ends."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Before a training batch, which is on its device."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a training batch; `outputs` is what `training_step` returned."""

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Before the gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Before the backward pass."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """After the backward pass, before the optimizer step."""

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Before an optimizer step, with unscaled and not yet clipped gradients."""

    # ---- validation

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Validation begins."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Validation ends: its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """The validation loaders are about to be run through."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """All validation loaders were run through."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation batch."""

    # ---- test

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """The test begins."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """The test ends."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """The test loaders are about to be run through."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """All test loaders were run through."""

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a test batch."""

    # ---- predict

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Prediction begins."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Prediction ends."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """The prediction loaders are about to be run through."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """All prediction loaders were run through."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a prediction batch; `outputs` is what `predict_step` returned."""


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_")
)
"""The names of all hooks, in the order above."""


def acts_at_epoch_end(trainer: Trainer, asked: bool | None) -> bool:
    """Whether a callback that watches a metric acts at a training epoch's end, and not after each validation.

    Args:
        trainer: with its intervals of validation.
        asked: what the user said; None leaves it to when validation runs: once per epoch, or never, means its end.
    """
    if asked is not None:
        return asked
    if sum(trainer.num_val_batches) == 0:
        return True
    interval = trainer.val_check_interval  # a float is a fraction of an epoch, an int counts batches
    return isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1
