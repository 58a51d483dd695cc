"""Train the digits for an epoch with one tracker, every step logged; may kill itself after a step.

python -m tests.loggers.trackers.train TRACKER ROOT [STEP SIGNAL]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Callback, Trainer, TrainModule, seed_everything
from instep.callbacks import ModelCheckpoint
from tests.loggers.trackers.trackers import TRACKERS

STEPS = 60
SAVE_EVERY = 15


class Digits(TrainModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("third", (self.global_step + 1) / 3)  # no float32
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopAt(Callback):
    """Sends this process a signal after a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def main(tracker: str, root: str, *stop: str) -> None:
    torch.set_num_threads(1)
    seed_everything(0)
    digits: Any = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, val = (TensorDataset(images[part], labels[part]) for part in (slice(0, 16 * STEPS), slice(1500, 1797)))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        log_every_n_steps=1,
        trigger_every=1,
        default_root_dir=Path(root) / "runs",
        logger=TRACKERS[tracker].logger(Path(root)),
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=SAVE_EVERY, save_top_k=1, save_last=True),
            *([StopAt(int(stop[0]), getattr(signal, stop[1]))] if stop else []),
        ],
    )
    trainer.fit(Digits(), DataLoader(train, 16, shuffle=True), DataLoader(val, 100), ckpt_path="auto")


if __name__ == "__main__":
    main(*sys.argv[1:])
