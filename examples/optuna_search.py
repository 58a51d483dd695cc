"""Search a learning rate and a dropout for scikit-learn's digits with Optuna; bad trials are pruned early.

    python examples/optuna_search.py                    # 12 trials; some seconds
    python examples/optuna_search.py --smoke            # 3 trials of 2 epochs; seconds
    torchrun --nproc-per-node 2 examples/optuna_search.py

The pruner is told the validation loss after each epoch, and ends a trial that does worse than the median of those
before it. With several processes the main one alone has the study: it sends the others what each trial is to try, and
`OptunaPruning` lets all of them leave a pruned trial together. (`pip install 'instep[optuna,examples]'`)
"""

from __future__ import annotations

import argparse
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import DataModule, PartialState, Trainer, TrainModule, seed_everything
from instep.callbacks import OptunaPruning
from instep.distributed import broadcast_object


class Data(DataModule):
    """The 1,797 images, 1,400 of them to train with."""

    def setup(self, stage: str) -> None:
        digits: Any = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32).div_(16)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], torch.tensor(digits.target)[order]
        self.train = TensorDataset(images[:1400], labels[:1400])
        self.val = TensorDataset(images[1400:], labels[1400:])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=200)


class Digits(TrainModule):
    """Two layers.

    Args:
        lr: the learning rate.
        dropout: between the layers.
    """

    def __init__(self, lr: float, dropout: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(dropout), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def train(trial: optuna.Trial | None, settings: dict[str, float], epochs: int) -> float:
    """Train once, on all processes; only the main one has the trial."""
    seed_everything(0)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OptunaPruning(trial, monitor="val_loss")],
    )
    trainer.fit(Digits(**settings), datamodule=Data())
    return float(trainer.callback_metrics["val_loss"])


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(description="Search settings with Optuna.")
    parser.add_argument("--smoke", action="store_true", help="3 trials of 2 epochs")
    args = parser.parse_args()
    trials, epochs = (3, 2) if args.smoke else (12, 8)
    if not PartialState().is_main_process:
        while (settings := broadcast_object(None)) is not None:
            try:
                train(None, settings, epochs)
            except optuna.TrialPruned:
                continue
        return

    def objective(trial: optuna.Trial) -> float:
        lr, dropout = trial.suggest_float("lr", 1e-5, 1.0, log=True), trial.suggest_float("dropout", 0, 0.5)
        return train(trial, broadcast_object({"lr": lr, "dropout": dropout}), epochs)

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
    )
    study.enqueue_trial({"lr": 1e-3, "dropout": 0.1})
    study.optimize(objective, n_trials=trials)
    broadcast_object(None)
    pruned = sum(trial.state.name == "PRUNED" for trial in study.trials)
    print(f"{len(study.trials)} trials, {pruned} pruned; best loss {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
