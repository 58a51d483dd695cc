from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from instep.callbacks import OptunaPruning
from instep.errors import SettingError
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet


class Pruned(Exception):
    pass


class Trial:
    """Stands for optuna's: prunes at its second report."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, int]] = []

    def report(self, value: float, step: int) -> None:
        self.reports.append((value, step))

    def should_prune(self) -> bool:
        return len(self.reports) == 2


class Logs(Toy):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.hparams.lr)


def _rank() -> tuple[str, int, int]:
    sys.modules["optuna"] = SimpleNamespace(TrialPruned=Pruned)  # type: ignore[assignment]
    trial = Trial()
    trainer = quiet(max_epochs=5, devices=2, val_check_interval=0.5, callbacks=[OptunaPruning(trial, "val_loss")])
    try:
        trainer.fit(Logs(), loader(16), loader(8))
    except Pruned as pruned:
        return str(pruned), trainer.current_epoch, len(trial.reports)
    return "", trainer.current_epoch, len(trial.reports)


@pytest.mark.dist
def test_rank_zero_decides_and_all_are_pruned() -> None:
    (text, *first), other = run_ranks(_rank, 2)
    assert text.startswith("Optuna pruned the trial in epoch 2: val_loss=0.1")
    assert other == (text, first[0], 0)
    assert first[1] == 2


@pytest.mark.optuna
def test_a_study_of_optuna_prunes_the_worse_trial() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", 0.1, 0.9)
        trainer = quiet(max_epochs=4, callbacks=[OptunaPruning(trial, "val_loss")])
        trainer.fit(Logs(lr), loader(16), loader(8))
        return float(trainer.callback_metrics["val_loss"])

    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.5, n_warmup_steps=1))
    for lr in (0.1, 0.9):
        study.enqueue_trial({"lr": lr})
    study.optimize(objective, n_trials=2)
    done, pruned = study.trials
    assert done.state.name == "COMPLETE"
    assert sorted(done.intermediate_values) == [0, 1, 2, 3]
    assert pruned.state.name == "PRUNED"
    assert sorted(pruned.intermediate_values) == [0, 1]
    with pytest.raises(SettingError, match=r"nothing of that name was logged\. There are val_loss"):
        quiet(max_epochs=1, callbacks=[OptunaPruning(study.ask(), "loss")]).fit(Logs(), loader(16), loader(8))
