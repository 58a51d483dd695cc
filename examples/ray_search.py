"""Search a learning rate for scikit-learn's digits with Ray Tune; trials that fail are started again and go on.

    python examples/ray_search.py                  # 4 trials of 6 epochs on this machine; a minute
    python examples/ray_search.py --smoke          # 1 trial of 3 epochs
    python examples/ray_search.py --smoke --fail   # it fails in its last epoch, goes on, and ends the same

Ray keeps the checkpoints, which come with each report, and gives the last one to a trial that it starts again.
(`pip install 'instep[examples]' 'ray[tune]'`)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule, seed_everything
from instep.callbacks import RayReport


class Digits(TrainModule):
    """Two layers.

    Args:
        lr: the learning rate.
        fails_in: an epoch in which it fails; None: it does not.
    """

    def __init__(self, lr: float, fails_in: int | None) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.fails_in = fails_in
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.fails_in:
            raise RuntimeError("this trial fails once")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(slice(None, 1400)), batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(slice(1400, None)), batch_size=200)


def samples(part: slice) -> TensorDataset:
    """Return a part of the 1,797 images, and what they show."""
    digits: Any = load_digits()
    return TensorDataset(torch.tensor(digits.data[part], dtype=torch.float32) / 16, torch.tensor(digits.target[part]))


def train(config: dict[str, Any]) -> None:
    """Run one trial."""
    seed_everything(0)
    ckpt_path = RayReport.ckpt_path()
    fails = config["fail"] and ckpt_path is None
    trainer = Trainer(
        max_epochs=config["epochs"],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RayReport("val_loss")],
    )
    trainer.fit(Digits(config["lr"], config["epochs"] - 1 if fails else None), ckpt_path=ckpt_path)


def main() -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--fail", action="store_true", help="each trial fails once")
    parser.add_argument("--root", default="runs/ray_search", help="where Ray keeps results and checkpoints")
    given = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    rates = [0.003] if given.smoke else [0.0003, 0.001, 0.003, 0.01]
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search(rates), "epochs": 3 if given.smoke else 6, "fail": given.fail},
        tune_config=tune.TuneConfig(metric="val_loss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(
            storage_path=str(Path(given.root).resolve()),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    )
    results = tuner.fit()
    best = results.get_best_result()
    config, metrics = best.config or {}, best.metrics or {}
    print(f"{len(results)} trials, {results.num_errors} failed; best loss {metrics['val_loss']} with lr={config['lr']}")
    print(f"its checkpoint: {best.checkpoint}")


if __name__ == "__main__":
    main()
