"""`OptunaPruning`: end a run early if Optuna finds it worse than the other trials of the study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.callbacks.guests.reporting import Reporting
from instep.utils.checks import METRIC
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_PRUNE = "optuna: prune"


class OptunaPruning(Reporting):
    """Report a metric to an Optuna trial once an epoch, and stop fit if the study's pruner decides to prune the trial.

    Only the main process talks to the study. If the trial is pruned, all ranks stop at the same step, and at the end of
    `fit` each of them raises `optuna.TrialPruned`.

    Args:
        trial: the `optuna.Trial` in the main process; other ranks may pass None.
        monitor: name of the logged metric. It is read after the first validation of an epoch, or at the end of the
            epoch if fit does not validate; it is reported to Optuna with the epoch as the step.

    Raises:
        SettingError: `monitor` is not a name. (In the run:) no metric of that name was logged.
        MissingPackageError: optuna is not installed.
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
        self._reported = -1  # the last epoch whose metric was reported

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
