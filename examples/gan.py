"""A GAN with two optimizers, stepped by hand: draw the handwritten digit that is asked for.

    python examples/gan.py                # the same line goes on after Ctrl-C or a crash
    python examples/gan.py --devices 2    # the same global batch on two processes
    python examples/gan.py --smoke        # a few batches, to see that it runs

Shows manual optimization: two optimizers, each with backward and step of its own in one `training_step`. Both nets know
the digit that is asked for. A judge, scikit-learn's classifier of real digits, reads 1,000 drawn ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule, seed_everything

GLOBAL_BATCH = 64  # images per optimizer step over all processes
NOISE = 32


class GAN(TrainModule):
    """A generator from noise and a digit to an image, and a critic of an image and a digit.

    Args:
        width: of the hidden layers.
        lr: learning rate of both optimizers.
    """

    automatic_optimization = False

    def __init__(self, width: int = 256, lr: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.generator = nn.Sequential(
            nn.Linear(NOISE + 10, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, 64), nn.Sigmoid(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Linear(64 + 10, width), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Dropout(0.3), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, digits: Tensor) -> Tensor:
        """Images, shape (batch, 64), of digits, shape (batch,)."""
        noise = torch.randn(len(digits), NOISE, device=self.device)
        return self.generator(torch.cat([noise, F.one_hot(digits, 10)], dim=1))

    def realness(self, images: Tensor, digits: Tensor) -> Tensor:
        """The critic's logits: real or drawn."""
        return self.critic(torch.cat([images, F.one_hot(digits, 10)], dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        generator_optimizer, critic_optimizer = self.optimizers()

        with self.toggled_optimizer(critic_optimizer):  # no gradients for the generator's weights meanwhile
            real, fake = self.realness(images, digits), self.realness(self(digits).detach(), digits)
            critic_loss = F.softplus(-real).mean() + F.softplus(fake).mean()
            critic_optimizer.zero_grad()
            self.manual_backward(critic_loss)
            critic_optimizer.step()

        with self.toggled_optimizer(generator_optimizer):
            generator_loss = F.softplus(-self.realness(self(digits), digits)).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(generator_loss)
            generator_optimizer.step()
        self.log_dict({"critic_loss": critic_loss, "generator_loss": generator_loss}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(net.parameters(), lr=self.hparams.lr, betas=(0.5, 0.99))
            for net in (self.generator, self.critic)
        ]


def main(argv: list[str] | None = None) -> None:
    """Train, let the judge read what was drawn, and show one of each digit."""
    parser = argparse.ArgumentParser(description="A conditional GAN of handwritten digits.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--root", type=Path, default=Path("runs/gan"), help="where runs go (default: runs/gan)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)

    seed_everything(0)
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        default_root_dir=args.root,
        fast_dev_run=4 if args.smoke else False,
    )
    model = GAN()
    # In manual optimization a shorter last batch would weigh as much as the others, so it is left out.
    loader = DataLoader(data, GLOBAL_BATCH // trainer.world_size, shuffle=True, drop_last=True)
    trainer.fit(model, loader, ckpt_path="auto")
    if trainer.is_global_zero:
        asked = torch.arange(10, device=model.device).repeat(100)
        drawn, steps = model.eval()(asked).detach().cpu(), trainer.global_step
        judge: Any = SVC()
        right = judge.fit(pixels / 16, labels).predict(drawn.numpy()) == asked.cpu().numpy()
        for row in drawn[:10].view(10, 8, 8).permute(1, 0, 2).flatten(1):
            print("".join(" .:*#"[int(4.99 * brightness)] * 2 for brightness in row))
        print(f"{right.mean():.1%} of 1,000 drawn digits are read as the one asked for, after {steps:,} steps")


if __name__ == "__main__":
    main()
