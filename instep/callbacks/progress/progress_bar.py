"""`ProgressBar`: the base class of progress bars, which counts batches and chooses metrics, but draws nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from instep.callbacks.base import Callback
from instep.callbacks.progress.view import showable
from instep.errors import UsageError
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


class ProgressBar(Callback):
    """The base class of progress bars; a Trainer has at most one.

    A subclass overrides hooks to draw the bar. Calling `ProgressBar(...)` makes the default bar, a `LiveProgressBar`
    with these arguments. To change only which metrics are shown, derive from `LiveProgressBar`.

    Example:
        >>> import sys
        >>> class Percent(ProgressBar):
        ...     def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        ...         percent = 100 * (batch_idx + 1) / self.total_train_batches
        ...         print(f"\\r{percent:.1f} %", end="", file=sys.stderr)
        >>> type(ProgressBar(leave=True)).__name__
        'LiveProgressBar'
    """

    goes_with: ClassVar[str] = "ModelSummary"
    """Class in `instep.callbacks` of the model summary that a Trainer with this bar shows by default."""

    _default: ClassVar[type[ProgressBar] | None] = None  # the class of the bar that `ProgressBar()` makes
    # These defaults are set on the class for a subclass that does not call `super().__init__()`.
    _trainer: Trainer | None = None
    _current_eval_dataloader_idx: int | None = None
    _enabled = True

    def __init_subclass__(cls, default: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if default:
            ProgressBar._default = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> ProgressBar:
        # ProgressBar() makes a LiveProgressBar, as pathlib.Path() makes a PosixPath. Python then calls its __init__.
        kind: Any = ProgressBar._default if cls is ProgressBar and ProgressBar._default is not None else cls
        return super().__new__(kind)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_trainer"}

    @property
    def trainer(self) -> Trainer:
        """The Trainer that the bar belongs to.

        Raises:
            UsageError: no run of the Trainer has begun.
        """
        if self._trainer is None:
            raise UsageError(f"{type(self).__name__}.trainer is known once a run of the Trainer has begun")
        return self._trainer

    # ---- methods to override

    @property
    def sanity_check_description(self) -> str:
        """Text before the bar of the sanity check."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """Text before the bar of training."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """Text before the bar of a validation."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """Text before the bar of a test."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """Text before the bar of a prediction."""
        return "Predicting"

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, Any]:
        """Return the values to show: the loggers' version as `v_num`, and the metrics logged with `prog_bar=True`.

        Metrics that are still on a device are left out: reading them would make the training wait.
        """
        standard, metrics = _version(trainer), showable(trainer.progress_bar_metrics)
        twice = sorted(standard.keys() & metrics.keys())
        if twice:
            warn_user(
                f"The progress bar already tracks a metric with the name(s) '{', '.join(twice)}' and "
                f"`self.log('{twice[0]}', ..., prog_bar=True)` will overwrite this value. Give it another name, or "
                "override `get_metrics()` of the progress bar."
            )
        return {**standard, **metrics}

    def enable(self) -> None:
        """Turn the bar on."""
        self._enabled = True

    def disable(self) -> None:
        """Turn the bar off. Called at the start of a run on every process but the main one."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line without breaking the bar; `trainer.print` and `module.print` call this method during a run."""
        print(*args, **kwargs)  # noqa: T201  it is a print

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    # ---- numbers of batches; infinity if a dataloader has no length

    @property
    def total_train_batches(self) -> int | float:
        """Number of training batches in an epoch, or up to `max_steps` if nothing else limits the run."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps is not None and trainer.max_steps > 0:
            left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
            return min(trainer.num_training_batches, trainer.position.window_batch + left)
        return trainer.num_training_batches

    @property
    def total_val_batches(self) -> int | float:
        """Number of validation batches of all dataloaders together; 0 in an epoch without validation."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        due = trainer.enable_validation and (every is None or (trainer.current_epoch + 1) % every == 0)
        return sum(trainer.num_val_batches) if due else 0

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current validation dataloader; in the sanity check, only those to check."""
        trainer = self.trainer
        return self._of_loader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current test dataloader."""
        return self._of_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Number of batches of the current predict dataloader."""
        return self._of_loader(self.trainer.num_predict_batches)

    def _of_loader(self, batches: list[int | float]) -> int | float:
        return batches[self._current_eval_dataloader_idx or 0]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Record the current dataloader, and return whether it differs from the dataloader of the last call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the dataloader that `has_dataloader_changed` has recorded. Called between evaluations."""
        self._current_eval_dataloader_idx = None


def _version(trainer: Trainer) -> dict[str, int | str]:
    """Return the loggers' version as `v_num`; {} if there is none.

    Several different versions are joined to one string. Of a string, only the last four characters are returned.
    """
    versions = dict.fromkeys(logger.version for logger in trainer.loggers)
    if len(versions) == 1:
        version = next(iter(versions))
    else:
        version = "_".join(str(version) for version in versions if version not in ("", None))
    if version in ("", None):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}
