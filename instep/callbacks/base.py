"""`Callback`, the base class of all callbacks, with every hook of fit, validate, test and predict."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any

from instep.errors import UsageError
from instep.utils.untrusted_files import clean

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from instep.trainer import Trainer, TrainModule


class Callback:
    """Code that runs at fixed points of a run, apart from the model.

    Override the hooks you need. Before the loop, the Trainer finds out once which hooks are overridden, so other hooks
    cost nothing per step. Names, order and arguments of the hooks are as in Lightning; every hook runs on every rank,
    in the order of `Trainer(callbacks=[...])`.

    A callback keeps what it must remember over a restart in `state_dict` and `load_state_dict`: tensors and JSON values
    only. Two callbacks of one class that both keep state need a different `state_key` each.

    A callback ends the training by `trainer.set_trigger("stop", reason="...")`, on any rank: all ranks leave the loop
    at the same step.

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

    runs_first: bool = False
    """True: the callback's hooks run before those of all others, at any place in the list of callbacks."""

    runs_last: bool = False
    """True: the callback's `on_..._end` hooks run after the module's, so that they see what the module logs there."""

    asks_to_validate: bool = False
    """True: the callback asks for more validations; callbacks that decide by a metric then act after each of them."""

    _module: TrainModule | None = None  # the module of the current run
    _origin = ""  # name of the package that added this callback; "" if the user passed it to the Trainer

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: the class's name unless overridden."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state to keep over a restart: tensors and JSON values. Called on all ranks; rank 0's is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Not called if the checkpoint has no state under this `state_key`."""

    def before_save(self, trainer: Trainer) -> None:
        """Called on all ranks before `state_dict` for a checkpoint: do reductions over ranks here.

        If all ranks raise an error here, no checkpoint is saved.
        """

    # ---- logging

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log one value from a hook; arguments and effect are those of `TrainModule.log`.

        Raises:
            UsageError: no fit, validate, test or predict is running.
        """
        self._running_module(name).log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Call `log` for each item of a dict; takes the further arguments of `log`."""
        self._running_module(", ".join(map(str, dictionary))).log_dict(dictionary, *args, **kwargs)

    def _running_module(self, name: str) -> TrainModule:
        if self._module is None:
            raise UsageError(
                f"{type(self).__name__}.log({name!r}) was called outside of a run. Log in a hook that the Trainer "
                "calls, or use `trainer.logger.log_metrics`."
            )
        return self._module

    # ---- the run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called at the start of a run; `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called at the end of a run, also if the run failed."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Called when an exception, such as KeyboardInterrupt, ends the run."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written, to add keys to it; their values are tensors and JSON values."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was read; `checkpoint` contains the keys that `on_save_checkpoint` added."""

    # ---- fit

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of fit, when the model is set up and on its device."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of fit, before teardown."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the few validation batches that run before training."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the sanity check."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of training."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of training."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of a training epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of a training epoch."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        """Called before a training batch, which has already been moved to the device."""

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training batch; `outputs` is what `training_step` returned."""

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Called before the gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Called before the backward pass."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the backward pass, before the optimizer step."""

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Called before an optimizer step, when gradients are unscaled but not clipped yet."""

    # ---- validation

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of validation."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of validation, when its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch."""

    # ---- test

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of test."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of test."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test batch."""

    # ---- predict

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of predict."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of predict."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a prediction batch; `outputs` is what `predict_step` returned."""


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_")
)
"""Names of all hooks, in the order in which `Callback` defines them."""


def logs_here(trainer: Trainer) -> bool:
    """Return True if this process sends values to the loggers.

    The main process does. The other processes do if a logger takes values from every process.
    """
    return trainer.is_global_zero or any(getattr(logger, "_per_rank", False) for logger in trainer.loggers)


def acts_now(trainer: Trainer, at_epoch_end: bool | None, after_validation: bool) -> bool:
    """Return whether a callback acts on a metric now: after a validation in fit, or at the end of a training epoch.

    Args:
        trainer: the Trainer, whose arguments say how often it validates.
        at_epoch_end: True: act at the end of training epochs. False: act after validations. None: act at the end of
            training epochs if each epoch has one validation or there is no validation, and no callback asks for more
            validations; otherwise act after validations.
        after_validation: whether the call comes after a validation (True) or at the end of a training epoch (False).
    """
    if trainer.sanity_checking or trainer.state.fn != "fit":
        return False
    if at_epoch_end is None:
        interval = trainer.val_check_interval  # a float is a fraction of an epoch, an int is a number of batches
        once = isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1
        once = once and not any(getattr(each, "asks_to_validate", False) for each in trainer.callbacks)
        at_epoch_end = once or not trainer.enable_validation
    return at_epoch_end != after_validation


def print_text(trainer: Trainer, text: object) -> None:
    """Print a message above the progress bar, without control characters; on a terminal, lines break between words."""
    line = clean(str(text))
    if is_terminal(sys.stdout):
        wrap = TextWrapper(get_terminal_size().columns, "", "  ", break_long_words=False, break_on_hyphens=False)
        line = "\n".join(map(wrap.fill, line.splitlines()))
    trainer.print(line)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; False for None, for a closed stream and for one without `isatty`."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # the stream is None, has no `isatty`, or is closed
        return False
