"""A variational autoencoder: learn to compress handwritten digits to 8 numbers, and to draw new ones.

    python examples/vae.py                 # the same line goes on after Ctrl-C or a crash
    python examples/vae.py --devices 2     # the same global batch on two processes
    python examples/vae.py --smoke         # a few batches, to see that it runs

Shows a loss of several parts, each logged by name, and what the main process does alone at the end. The measure is the
bound on the negative log-likelihood of held-out images, in nats per image: lower is better.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule, seed_everything

GLOBAL_BATCH = 64  # images per optimizer step over all processes
LATENT = 8


class VAE(TrainModule):
    """An encoder to the mean and log-variance of a code, and a decoder from a code to the odds of each pixel.

    Args:
        width: of the hidden layers.
        lr: learning rate of Adam.
    """

    def __init__(self, width: int = 256, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, width), nn.SiLU(), nn.Linear(width, 64))

    def bound(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts of the negative evidence lower bound, in nats per image: reconstruction and divergence."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        codes = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()  # reparametrized: gradients reach both
        logits = self.decoder(codes)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(dim=1).mean()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=1).mean()
        return reconstruction, divergence

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        reconstruction, divergence = self.bound(batch[0])
        self.log_dict({"reconstruction": reconstruction, "divergence": divergence}, prog_bar=True)
        return reconstruction + divergence

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        reconstruction, divergence = self.bound(batch[0])
        self.log("val_nats", reconstruction + divergence, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    @torch.no_grad()
    def draw(self, count: int) -> Tensor:
        """New images, shape (count, 8, 8), brightness in 0..1."""
        codes = torch.randn(count, LATENT, device=self.device)
        return self.decoder(codes).sigmoid().unflatten(1, (8, 8))


def main(argv: list[str] | None = None) -> None:
    """Train, report the bound, and draw ten new digits."""
    parser = argparse.ArgumentParser(description="A variational autoencoder of handwritten digits.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--root", type=Path, default=Path("runs/vae"), help="where runs go (default: runs/vae)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)

    seed_everything(0)
    images = torch.tensor(load_digits(return_X_y=True)[0], dtype=torch.float32) / 16
    train, test = TensorDataset(images[:1500]), TensorDataset(images[1500:])
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        global_batch_size=GLOBAL_BATCH,
        check_val_every_n_epoch=5,
        default_root_dir=args.root,
        fast_dev_run=4 if args.smoke else False,
    )
    model = VAE()
    loaders = DataLoader(train, GLOBAL_BATCH, shuffle=True), DataLoader(test, GLOBAL_BATCH)
    trainer.fit(model, *loaders, ckpt_path="auto")
    [result] = trainer.validate(model, loaders[1], verbose=False)
    trainer.print(f"held-out images: {result['val_nats']:.2f} nats, {trainer.global_step} steps")
    if trainer.is_global_zero:
        for row in model.draw(10).permute(1, 0, 2).flatten(1):
            print("".join(" .:*#"[int(4.99 * brightness)] * 2 for brightness in row))


if __name__ == "__main__":
    main()
