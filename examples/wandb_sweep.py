"""Search a learning rate for scikit-learn's digits with a sweep of Weights & Biases.

    wandb login
    python examples/wandb_sweep.py                      # makes a sweep, and runs 5 of its runs here
    python examples/wandb_sweep.py --sweep USER/P/ID    # helps with a sweep that is there
    python examples/wandb_sweep.py --smoke              # one run without the server

Each run has a root of its own, by its id. One that a signal ends is marked as preempted: the sweep gives it to another
agent, and `ckpt_path="auto"` lets it go on where it was. (`pip install 'instep[examples]' wandb`)
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import wandb
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule, seed_everything
from instep.callbacks import WandbSweep
from instep.loggers import WandbLogger

SWEEP = {
    "method": "random",
    "metric": {"name": "val_loss.min", "goal": "minimize"},
    "parameters": {"lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1}},
}


class Digits(TrainModule):
    """Two layers.

    Args:
        lr: the learning rate.
    """

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

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


def train() -> None:
    """Run one run of the sweep."""
    seed_everything(0)
    run = wandb.init()
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        default_root_dir=f"runs/wandb_sweep/{run.id}",
        logger=WandbLogger(experiment=run),
        callbacks=[WandbSweep("val_loss", mode="min")],
    )
    trainer.fit(Digits(run.config.get("lr", 0.003)), ckpt_path="auto")
    print(f"best loss of {run.id}: {run.summary['val_loss']['min']}")


def main() -> None:
    """Make a sweep, or join one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--sweep", help="the path of a sweep")
    given = parser.parse_args()
    if given.smoke:
        os.environ["WANDB_MODE"] = "offline"
        train()
    else:
        wandb.agent(given.sweep or wandb.sweep(SWEEP, project="digits"), train, count=5)


if __name__ == "__main__":
    main()
