"""Classify images with a model, a schedule and a mixing of images from timm.

    pip install 'instep[recipes]' timm
    python examples/timm_digits.py                     # the same line goes on after Ctrl-C or a crash
    python examples/timm_digits.py --model vit_tiny_patch16_224    # one of timm's thousand
    python examples/timm_digits.py --devices 2         # the same global batch on two processes
    python examples/timm_digits.py --smoke             # a few batches, to see that it runs

Shows another package's model in a TrainModule, and a schedule that is no torch scheduler: `lr_scheduler_step` says how
it is stepped. mixup and CutMix blend images and labels on the device, after the batch was moved. The images are
scikit-learn's digits in 32 x 32; with `pretrained=True` in `create_model`, timm would fetch weights to begin with.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from sklearn.datasets import load_digits
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule, seed_everything

GLOBAL_BATCH = 64  # images per optimizer step over all processes
TRAIN = 1300


class Images(TrainModule):
    """A model of timm that tells ten classes apart.

    Args:
        model: its name.
        lr: the largest learning rate.
    """

    def __init__(self, model: str, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        size: dict[str, Any] = {"img_size": 32, "patch_size": 4} if model.startswith("vit") else {}
        self.net: nn.Module = timm.create_model(model, in_chans=1, num_classes=10, **size)
        self.mix = Mixup(mixup_alpha=0.2, cutmix_alpha=0.5, prob=0.5, label_smoothing=0.1, num_classes=10)
        self.loss = SoftTargetCrossEntropy()

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (batch, 10), of images, shape (batch, 1, 32, 32)."""
        return self.net(images)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.mix(*batch) if self.trainer.training else batch

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = CosineLRScheduler(optimizer, t_initial=steps, warmup_t=steps // 10, warmup_prefix=True)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.global_step)  # timm's are told the step; torch's count themselves


def main(argv: list[str] | None = None) -> None:
    """Train on 1,300 images, measure on the other 497."""
    parser = argparse.ArgumentParser(description="A model of timm on handwritten digits.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--model", default="resnet10t", help="(default: resnet10t)")
    parser.add_argument("--epochs", type=int, default=20, metavar="N", help="(default: 20)")
    parser.add_argument("--root", type=Path, default=Path("runs/timm"), help="where runs go (default: runs/timm)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)

    seed_everything(0)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = F.interpolate(pixels.float().view(-1, 1, 8, 8) / 16, size=(32, 32), mode="bilinear")
    # Mixup takes pairs within a batch, so batches are even.
    train = DataLoader(TensorDataset(images[:TRAIN], labels[:TRAIN]), GLOBAL_BATCH, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(images[TRAIN:], labels[TRAIN:]), 128)
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        global_batch_size=GLOBAL_BATCH,
        default_root_dir=args.root,
        fast_dev_run=4 if args.smoke else False,
    )
    model = Images(args.model)
    trainer.fit(model, train, test, ckpt_path="auto")
    [result] = trainer.validate(model, test, verbose=False)
    trainer.print(f"{args.model}: {result['accuracy']:.1%} of {len(images) - TRAIN} test images")


if __name__ == "__main__":
    main()
