"""The base class of callbacks: every hook of the four paths; the hooks of this class do nothing."""

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
    """True: its hooks run before those of all other callbacks, wherever it stands among them."""

    runs_last: bool = False
    """True: `on_..._end` hooks run after the module's own, so that they see its metrics."""

    asks_to_validate: bool = False
    """True: it asks for validations between those of the Trainer, and what reads a metric acts after each one."""

    _module: TrainModule | None = None  # the module that runs
    _origin = ""  # name of the package that added this callback; "" if the user passed it to the Trainer

    @property
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint: the class's name unless overridden."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """State to keep over a restart: tensors and JSON values. Called on every rank; that of rank 0 is written."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave. Not called if the checkpoint has no state for this key."""

    def before_save(self, trainer: Trainer) -> None:
        """Before a checkpoint's state is collected, on all ranks: do reductions over ranks for `state_dict` here.

        If all ranks raise an error here, nothing is saved.
        """

    # ---- logging

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log one value in a hook of the run, as `TrainModule.log` does, with the same arguments.

        Raises:
            UsageError: no run is under way.
        """
        self._running_module(name).log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """`log` for each item of a dict; takes the same arguments."""
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
        """At the start of a run; `stage` is one of "fit", "validate", "test", "predict"."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """At the end of a run, after an error too."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """When an exception, such as KeyboardInterrupt, ends the run."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written: keys may be added to it, with tensors and JSON values."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """After a checkpoint was read, which contains the keys that `on_save_checkpoint` added."""

    # ---- fit

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """At the start of fit: the model is set up and on its device."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """At the end of fit, before teardown."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the few validation batches that run before training."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the sanity check."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """At the start of training."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """At the end of training."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """At the start of a training epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """At the end of a training epoch."""

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
        """At the start of validation."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """At the end of validation: its metrics are in `trainer.callback_metrics`."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last validation batch."""

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
        """At the start of test."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """At the end of test."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last test batch."""

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
        """At the start of predict."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """At the end of predict."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """After the last prediction batch."""

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


def logs_here(trainer: Trainer) -> bool:
    """Return whether this process sends values to the loggers: the main process, or all if a logger wants all."""
    return trainer.is_global_zero or any(getattr(logger, "_per_rank", False) for logger in trainer.loggers)


def acts_now(trainer: Trainer, at_epoch_end: bool | None, after_validation: bool) -> bool:
    """Return whether a callback acts on a metric now: after a validation in fit, or at the end of a training epoch.

    Args:
        trainer: with its intervals of validation.
        at_epoch_end: which of the two the user wants; None leaves it to when validation runs: once per epoch, or never,
            means the epoch's end, unless a callback asks for validations.
        after_validation: whether this is after a validation, not at an epoch's end.
    """
    if trainer.sanity_checking or trainer.state.fn != "fit":
        return False
    if at_epoch_end is None:
        interval = trainer.val_check_interval  # a float is a fraction of an epoch, an int counts batches
        once = isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1
        once = once and not any(getattr(each, "asks_to_validate", False) for each in trainer.callbacks)
        at_epoch_end = once or not trainer.enable_validation
    return at_epoch_end != after_validation


def print_text(trainer: Trainer, text: object) -> None:
    """Print a line of instep's own above the progress bar: no control characters, and on a terminal no broken words."""
    line = clean(str(text))
    if is_terminal(sys.stdout):
        wrap = TextWrapper(get_terminal_size().columns, "", "  ", break_long_words=False, break_on_hyphens=False)
        line = "\n".join(map(wrap.fill, line.splitlines()))
    trainer.print(line)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal. A program may have no stdout, or an object with `write` alone there."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is no stream, or it is closed
        return False
