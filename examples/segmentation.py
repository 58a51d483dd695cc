"""Semantic segmentation: say of each pixel of a scene which handwritten digit it belongs to, or none.

    python examples/segmentation.py                # the same line goes on after Ctrl-C or a crash
    python examples/segmentation.py --devices 2    # the same global batch on two processes
    python examples/segmentation.py --smoke        # a few batches, to see that it runs

Shows a map-style data set that makes its samples by number, scenes of three of scikit-learn's digits, and a metric of
torchmetrics given to `self.log`, the mean intersection over union of classes: exact over all batches and processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import JaccardIndex

from instep import Trainer, TrainModule, seed_everything
from instep.schedules import one_cycle

GLOBAL_BATCH = 32  # scenes per optimizer step over all processes
SIZE, NOTHING = 32, 10  # pixels a side; the class of the ground


class Scenes(Dataset[tuple[Tensor, Tensor]]):
    """So many scenes, shape (1, 32, 32), and the class of each pixel, shape (32, 32), of some of the digits."""

    def __init__(self, digits: slice, count: int) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[digits], dtype=torch.float32).view(-1, 8, 8) / 16
        self.labels, self.count = torch.tensor(labels[digits]), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        scene = torch.rand(1, SIZE, SIZE, generator=random) * 0.3
        classes = torch.full((SIZE, SIZE), NOTHING)
        for quarter in torch.randperm(4, generator=random)[:3].tolist():
            chosen = int(torch.randint(len(self.labels), (), generator=random))
            shift = torch.randint(9, (2,), generator=random)
            top, left = (16 * torch.tensor(divmod(quarter, 2)) + shift).tolist()
            place = slice(top, top + 8), slice(left, left + 8)
            scene[0][place] = torch.maximum(scene[0][place], self.images[chosen])
            classes[place][self.images[chosen] > 0.3] = self.labels[chosen]
        return scene, classes


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with norm and ReLU."""
    one, two = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
    return nn.Sequential(one, nn.GroupNorm(4, outputs), nn.ReLU(), two, nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(TrainModule):
    """A net that goes down to a quarter of the size and up again, with bridges between equal sizes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(1, width), convolutions(width, 2 * width)])
        self.middle = convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList([convolutions(6 * width, 2 * width), convolutions(3 * width, width)])
        self.head = nn.Conv2d(width, NOTHING + 1, 1)
        self.iou = JaccardIndex(task="multiclass", num_classes=NOTHING + 1)

    def forward(self, x: Tensor) -> Tensor:
        bridges = []
        for block in self.down:
            bridges.append(x := block(x))
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), bridges.pop()], dim=1))
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.iou(self(batch[0]), batch[1])
        self.log("iou", self.iou, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3)
        return [optimizer], [one_cycle(optimizer, int(self.trainer.estimated_stepping_batches))]


def main(argv: list[str] | None = None) -> None:
    """Train on 2,048 scenes, measure on 512."""
    parser = argparse.ArgumentParser(description="Segment scenes of handwritten digits.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=15, metavar="N", help="(default: 15)")
    parser.add_argument("--root", type=Path, default=Path("runs/segmentation"), help="(default: runs/segmentation)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)
    seed_everything(0)
    train = DataLoader(Scenes(slice(0, 1400), 2048), GLOBAL_BATCH, shuffle=True)
    test = DataLoader(Scenes(slice(1400, 1797), 512), GLOBAL_BATCH)
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        global_batch_size=GLOBAL_BATCH,
        default_root_dir=args.root,
        fast_dev_run=4 if args.smoke else False,
    )
    trainer.fit(model := UNet(), train, test, ckpt_path="auto")
    [result] = trainer.validate(model, test, verbose=False)
    trainer.print(f"mean intersection over union of 512 test scenes: {result['iou']:.3f}")


if __name__ == "__main__":
    main()
