"""Base class of the callbacks that report metrics to a hyperparameter search, such as Optuna or Ray Tune."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from instep.callbacks.base import Callback, acts_now
from instep.errors import SettingError

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule


class Reporting(Callback):
    """Base class that calls `_report` after each validation of fit, or after each epoch if fit does not validate."""

    runs_last = True

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if acts_now(trainer, None, after_validation=True):
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if acts_now(trainer, None, after_validation=False):
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        """Send the current values of the metrics to the hyperparameter search."""
        raise NotImplementedError

    def _check_logged(self, trainer: Trainer, field: str, names: Iterable[str]) -> None:
        """Raise a SettingError for a name that was never logged.

        Args:
            trainer: the Trainer, whose `callback_metrics` are searched.
            field: the callback's argument that the names come from, for the error text.
            names: names of metrics.
        """
        logged = trainer.callback_metrics
        for name in names:
            if name not in logged:
                raise SettingError(
                    f"{type(self).__name__}({field}={name!r}): nothing of that name was logged. There are "
                    f"{', '.join(sorted(logged)) or 'no metrics'}.",
                    field=field,
                    got=name,
                )
