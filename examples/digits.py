"""Train a small convolutional net on scikit-learn's 1,797 images of handwritten digits.

    python examples/digits.py                          # train and test; a few seconds
    python examples/digits.py --devices 2              # the same global batch on two processes
    instep launch --devices 2 examples/digits.py
    torchrun --nproc-per-node 2 examples/digits.py
    python examples/digits.py --resume                 # go on after Ctrl-C, SIGTERM or a crash
    python examples/digits.py --evaluate runs/digits/.../step-...   # test one checkpoint, exact counts

The images ship with scikit-learn (`pip install 'instep[examples]'`), so nothing is downloaded. Training, validation and
test images are fixed; `--seed` changes the weights, the order and the dropout only.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import DataModule, Trainer, TrainModule, seed_everything
from instep.callbacks import LearningRateMonitor, ModelCheckpoint
from instep.loggers import CSVLogger, TensorBoardLogger

TRAIN, VAL = 1200, 300  # the remaining 297 images are the test set
GLOBAL_BATCH = 64  # samples per optimizer step over all processes


class DigitsData(DataModule):
    """The images, split once and for all.

    Args:
        workers: processes that load data; 0 loads in the training process.
    """

    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def setup(self, stage: str) -> None:
        """Read and split the images: float32 in 0..1, shape (1, 8, 8)."""
        digits: Any = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).div_(16).unsqueeze(1)
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val, test = order.tensor_split([TRAIN, TRAIN + VAL])
        self.train = TensorDataset(images[train], labels[train])
        self.val = TensorDataset(images[val], labels[val])
        self.test = TensorDataset(images[test], labels[test])

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, GLOBAL_BATCH, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val, 100)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test, 100)

    def _loader(self, data: TensorDataset, batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            data, batch_size, shuffle=shuffle, num_workers=self.workers, persistent_workers=self.workers > 0
        )


class Digits(TrainModule):
    """Two convolutions and two linear layers, 85,066 parameters.

    Args:
        lr: the largest learning rate of the one-cycle schedule.
        dropout: probability after the convolutions; twice as much before the last layer.
    """

    def __init__(self, lr: float = 4e-3, dropout: float = 0.25) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(2 * dropout),
            nn.Linear(64, 10),
        )
        self.training_s = 0.0

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (batch, 10), of images, shape (batch, 1, 8, 8)."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self(batch[0]), batch[1]
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", accuracy(logits, labels), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits, labels = self(batch[0]), batch[1]
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", accuracy(logits, labels), prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits, labels = self(batch[0]), batch[1]
        self.log("test_loss", F.cross_entropy(logits, labels))
        self.log("test_correct", (logits.argmax(dim=1) == labels).sum(), reduce_fx="sum")
        self.log("test_samples", len(labels), reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self._started = time.perf_counter()

    def on_train_end(self) -> None:
        self.training_s = time.perf_counter() - self._started


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The fraction of the batch whose largest logit is the label's."""
    return (logits.argmax(dim=1) == labels).float().mean()


def main() -> None:
    """Train and test, or test one checkpoint."""
    args = parse_arguments()
    torch.set_num_threads(1)  # the net is so small that threads cost more by waiting for each other than they give
    seed_everything(args.seed)
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_epochs=args.max_epochs,
        global_batch_size=GLOBAL_BATCH,
        default_root_dir=args.root,
        log_every_n_steps=5,
        logger=[TensorBoardLogger(), CSVLogger(flush_logs_every_n_steps=20)],
        callbacks=[ModelCheckpoint(monitor="val_accuracy", mode="max", save_last=True), LearningRateMonitor()],
    )
    model, data = Digits(), DigitsData(args.workers)
    if args.evaluate is None:
        trainer.fit(model, datamodule=data, ckpt_path="auto" if args.resume else None)
        trainer.print(f"trained {trainer.global_step} steps on {trainer.world_size} process(es)")
        trainer.print(f"training took {model.training_s:.1f} s")
    [result] = trainer.test(model, datamodule=data, ckpt_path=args.evaluate or "best", verbose=False)
    correct, samples = round(float(result["test_correct"])), round(float(result["test_samples"]))
    trainer.print(f"test accuracy {correct / samples:.2%}: {correct} of {samples} correct")
    trainer.print(f"test loss {float(result['test_loss'])!r}")
    trainer.print(f"dashboard: tensorboard --logdir {trainer.log_dir}")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small net on images of handwritten digits.")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ... (default: what this machine has)")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed, ... (default: 32-true)")
    parser.add_argument("--max-epochs", type=int, default=15, metavar="N", help="(default: 15)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint under --root, if any")
    parser.add_argument("--evaluate", metavar="CKPT", help="test this checkpoint instead of training")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="data loading processes (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--root", type=Path, default=Path("runs/digits"), help="where runs go (default: runs/digits)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
