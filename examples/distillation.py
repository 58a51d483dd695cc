"""Distillation: a small net learns from a large one what the labels do not say.

    python examples/distillation.py                # the same line goes on after Ctrl-C or a crash
    python examples/distillation.py --devices 2    # the same global batch on two processes
    python examples/distillation.py --smoke        # a few batches, to see that it runs

Shows several runs in one program, each in a folder of its own, and a frozen net inside a module that trains. A teacher,
a convolutional net, has 1,200 labels. Two students of 1,360 parameters have 100 of them; one hears the teacher too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from instep import Trainer, TrainModule, seed_everything

GLOBAL_BATCH = 50  # images per optimizer step over all processes
TRAIN, LABELLED = 1200, 100
TEMPERATURE = 3.0


class Classifier(TrainModule):
    """A net that learns labels of images, shape (batch, 64)."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.net = self.make_net()

    def make_net(self) -> nn.Module:
        """A convolutional net of 93,322 parameters."""
        features = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
        head = nn.Sequential(nn.MaxPool2d(2), nn.Dropout(0.4), nn.Flatten(), nn.Linear(1024, 72), nn.ReLU())
        return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), features, head, nn.Linear(72, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Student(Classifier):
    """A net with one small hidden layer."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 18), nn.ReLU(), nn.Linear(18, 10))


class Distilled(Student):
    """A student of a frozen teacher."""

    def __init__(self, teacher: Classifier, lr: float = 3e-3) -> None:
        super().__init__(lr)
        self.teacher = teacher.freeze()  # eval mode, so no dropout; the Trainer leaves it so

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0]) / TEMPERATURE
        taught = self.teacher(batch[0]) / TEMPERATURE
        loss = F.kl_div(logits.log_softmax(1), taught.log_softmax(1), log_target=True, reduction="batchmean")
        self.log("train_loss", loss, prog_bar=True)
        return loss * TEMPERATURE**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=self.hparams.lr)


def main(argv: list[str] | None = None) -> None:
    """Train a teacher, a student without it and one with it; compare their accuracy."""
    parser = argparse.ArgumentParser(description="A small net learns from a large one.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=40, metavar="N", help="of 1,200 images (default: 40)")
    parser.add_argument("--root", type=Path, default=Path("runs/distillation"), help="(default: runs/distillation)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)
    seed_everything(0)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    every = TensorDataset(images[:TRAIN], labels[:TRAIN])
    few = ConcatDataset([TensorDataset(images[:LABELLED], labels[:LABELLED])] * (TRAIN // LABELLED))  # as many steps
    test = DataLoader(TensorDataset(images[TRAIN:], labels[TRAIN:]), 100)

    def train(name: str, model: Classifier, data: Dataset[Any]) -> float:
        trainer = Trainer(
            devices=args.devices,
            max_epochs=args.epochs,
            global_batch_size=GLOBAL_BATCH,
            check_val_every_n_epoch=10,
            default_root_dir=args.root / name,  # "auto" looks here
            fast_dev_run=4 if args.smoke else False,
        )
        trainer.fit(model, DataLoader(data, GLOBAL_BATCH, shuffle=True), test, ckpt_path="auto")
        return float(trainer.validate(model, test, verbose=False)[0]["accuracy"])

    teacher = Classifier()
    accuracy = {"teacher": train("teacher", teacher, every)}
    accuracy["student"] = train("student", Student(), few)
    accuracy["distilled student"] = train("distilled", Distilled(teacher), every)
    for name, value in accuracy.items():
        teacher.print(f"{name}: {value:.1%} of {len(images) - TRAIN} test images")


if __name__ == "__main__":
    main()
