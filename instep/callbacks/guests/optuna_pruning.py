"""Optuna's pruning: a run that is worse than the study's other trials is ended early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.callbacks.guests.reporting import Reporting
from instep.utils.checks import METRIC
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_PRUNE = "optuna: prune"


class OptunaPruning(Reporting):
    """Report a metric to an Optuna trial once an epoch, and end the fit if the study's pruner decides so.

    The main process alone talks to the study, so that any number of ranks may train: the decision reaches them as a
    trigger, and `fit` raises `optuna.TrialPruned` on all of them at its end.

    Args:
        trial: the `optuna.Trial`; on other ranks than the main process anything, such as None.
        monitor: the logged metric. It is read after an epoch's first validation, or at the epoch's end where fit does
            not validate; the study's step is the epoch.

    Raises:
        SettingError: `monitor` is no name. In the run: nothing of that name was logged.
        MissingPackageError: there is no optuna.
        optuna.TrialPruned: (from `fit`) the trial was pruned.

    Example:
        >>> from instep import Trainer
        >>> def objective(trial):  # for study.optimize(objective)
        ...     model = Model(lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True))
        ...     trainer = Trainer(max_epochs=10, callbacks=[OptunaPruning(trial, monitor="val_loss")])
        ...     trainer.fit(model, datamodule=data)
        ...     return float(trainer.callback_metrics["val_loss"])
    """

    def __init__(self, trial: Any, monitor: str) -> None:
        self._optuna = require("optuna", extra="optuna", purpose="OptunaPruning")
        self._trial = trial
        self.monitor = METRIC("monitor", monitor)
        self._reported = -1  # the last epoch that was reported

    def _report(self, trainer: Trainer) -> None:
        epoch = trainer.position.epoch
        if epoch == self._reported:
            return
        self._check_logged(trainer, "monitor", [self.monitor])
        self._reported = epoch
        if trainer.is_global_zero:
            value = float(trainer.callback_metrics[self.monitor])
            self._trial.report(value, step=epoch)
            if self._trial.should_prune():
                trainer.set_trigger(_PRUNE)
                trainer.set_trigger("stop", f"Optuna pruned the trial in epoch {epoch + 1}: {self.monitor}={value:g}")

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.check_trigger(_PRUNE):
            raise self._optuna.TrialPruned(trainer.stop_reason or f"Optuna pruned the trial by {self.monitor}")

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._reported} if self._reported >= 0 else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._reported = int(state_dict["epoch"])
