"""Contrastive learning (SimCLR): learn what digits look like without labels, then tell them apart with very few.

    python examples/contrastive.py                # the same line goes on after Ctrl-C or a crash
    python examples/contrastive.py --devices 2    # the same global batch on two processes
    python examples/contrastive.py --smoke        # a few batches, to see that it runs

Shows a loss over the batch of all processes, through which gradients flow back to each (`all_gather(sync_grads=True)`),
and augmentation on the device. Two views of an image shall be alike, and unlike those of all other images. In the end
a linear classifier on the learned features, and one on the pixels, get 5 labels per digit. Source: Chen et al., 2020.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule, seed_everything
from instep.schedules import one_cycle

GLOBAL_BATCH = 256  # images per optimizer step over all processes
TRAIN = 1280  # images without labels; the others are for the test


class SimCLR(TrainModule):
    """An encoder to 128 features, and a projection on which views are compared.

    Args:
        temperature: of the softmax over similarities.
        lr: the largest learning rate of the one-cycle schedule.
    """

    def __init__(self, temperature: float = 0.2, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(512, 128),
        )  # fmt: skip
        self.projection = nn.Sequential(nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, images: Tensor) -> Tensor:
        """Features, shape (batch, 128), of images, shape (batch, 1, 8, 8)."""
        return self.encoder(images)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        views = [F.normalize(self.projection(self(augment(batch[0]))), dim=1) for _ in range(2)]
        # Shape (views, batch, 64) here; of several processes (process, views, batch, 64).
        z = self.all_gather(torch.stack(views), sync_grads=True)
        z = z.movedim(-3, 0).reshape(-1, 64)  # the first views of all images, then the second ones
        count = len(z) // 2
        similarity = (z @ z.T / self.hparams.temperature).fill_diagonal_(-torch.inf)  # not to itself
        partner = torch.arange(2 * count, device=z.device).roll(count)
        loss = F.cross_entropy(similarity, partner)
        self.log("train_loss", loss, prog_bar=True)
        self.log("found", (similarity.argmax(dim=1) == partner).float().mean(), prog_bar=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=1e-3)
        return [optimizer], [one_cycle(optimizer, int(self.trainer.estimated_stepping_batches))]


def augment(images: Tensor) -> Tensor:
    """Turn by up to 20 degrees, scale by up to a fifth, shift by up to a pixel and a half, and add noise."""

    def uniform(limit: float) -> Tensor:
        return (torch.rand(len(images), device=images.device) * 2 - 1) * limit

    angle, scale = uniform(math.radians(20)), 1 + uniform(0.2)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    matrix = torch.stack([cos, -sin, uniform(0.375), sin, cos, uniform(0.375)], dim=1)
    grid = F.affine_grid(matrix.view(-1, 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + 0.1 * torch.randn_like(images)


def main(argv: list[str] | None = None) -> None:
    """Train without labels, then compare classifiers that have few."""
    parser = argparse.ArgumentParser(description="Learn digits without labels.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--root", type=Path, default=Path("runs/contrastive"), help="(default: runs/contrastive)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)

    seed_everything(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    # Whole batches only: what processes gather must have one shape.
    loader = DataLoader(TensorDataset(images[:TRAIN]), GLOBAL_BATCH, shuffle=True, drop_last=True)
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        global_batch_size=GLOBAL_BATCH,
        log_every_n_steps=5,
        default_root_dir=args.root,
        fast_dev_run=4 if args.smoke else False,
    )
    model = SimCLR()
    trainer.fit(model, loader, ckpt_path="auto")
    if trainer.is_global_zero:
        few = [index for digit in range(10) for index in (labels[:TRAIN] == digit).nonzero()[0][:5]]
        with torch.no_grad():
            features = F.normalize(model.eval()(images.to(model.device)), dim=1).cpu().numpy()
        for name, x in (("pixels", pixels / 16), ("learned features", features)):
            classifier = LogisticRegression(C=10, max_iter=1000).fit(x[few], labels[few])
            accuracy = classifier.score(x[TRAIN:], labels[TRAIN:])
            print(f"5 labels per digit, {name}: {accuracy:.1%} of {len(x) - TRAIN} test images")


if __name__ == "__main__":
    main()
