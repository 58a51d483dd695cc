"""Time series: forecast a year of the carbon dioxide in the air over Mauna Loa from the two years before.

    python examples/forecasting.py                # the same line goes on after Ctrl-C or a crash
    python examples/forecasting.py --devices 2    # the same global batch on two processes
    python examples/forecasting.py --smoke        # a few batches, to see that it runs

Shows a DataModule, a split by time (nothing of the test years is seen in training), and a forecast of quantiles: for
each week a median, and a range that should hold four values of five. The data, weekly from 1958 to 2001, come with
statsmodels: pip install 'instep[recipes]'. Compared with it: last year's weeks, risen as much as the year before.
Source: the net is the NLinear of Zeng et al., Are Transformers Effective for Time Series Forecasting?, 2022.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from statsmodels.datasets import co2
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from instep import DataModule, Trainer, TrainModule, seed_everything
from instep.schedules import cosine

GLOBAL_BATCH = 64  # windows per optimizer step over all processes
PAST, FUTURE = 104, 52  # weeks
TEST_WEEKS = 260
QUANTILES = (0.1, 0.5, 0.9)


class CarbonDioxide(DataModule):
    """Windows of past and future weeks, in parts per million."""

    def setup(self, stage: str) -> None:
        """Read the series; a few missing weeks are interpolated."""
        weeks: Any = co2.load().data
        series = torch.tensor(weeks["co2"].interpolate().to_numpy(), dtype=torch.float32)
        windows = series.unfold(0, PAST + FUTURE, 1)
        samples = TensorDataset(windows[:, :PAST], windows[:, PAST:])
        first_test = len(series) - TEST_WEEKS - PAST  # the first window whose future is all in the test years
        self.train = Subset(samples, range(first_test - FUTURE))
        self.test = Subset(samples, range(first_test, len(samples)))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, GLOBAL_BATCH, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, GLOBAL_BATCH)


class NLinear(TrainModule):
    """One linear layer from the past to the quantiles of the future, both relative to the last value seen.

    Args:
        lr: learning rate at the start; a cosine brings it to 0.
    """

    quantiles: Tensor

    def __init__(self, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(PAST, len(QUANTILES) * FUTURE)
        self.register_buffer("quantiles", torch.tensor(QUANTILES)[:, None], persistent=False)

    def forward(self, past: Tensor) -> Tensor:
        """Quantiles, shape (batch, 3, 52), of a past, shape (batch, 104)."""
        last = past[:, -1:]
        return last.unsqueeze(1) + self.linear(past - last).unflatten(1, (len(QUANTILES), FUTURE))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        over = batch[1].unsqueeze(1) - self(batch[0])
        loss = torch.maximum(self.quantiles * over, (self.quantiles - 1) * over).mean()  # the pinball loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        past, future = batch
        low, median, high = self(past).unbind(1)
        naive = past[:, -52:] + (past[:, -52:].mean(1) - past[:, :52].mean(1)).unsqueeze(1)
        self.log("error", (median - future).abs().mean())
        self.log("naive_error", (naive - future).abs().mean())
        self.log("inside", ((low <= future) & (future <= high)).float().mean())

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [cosine(optimizer, int(self.trainer.estimated_stepping_batches))]


def main(argv: list[str] | None = None) -> None:
    """Train on the first 38 years, then forecast the last five."""
    parser = argparse.ArgumentParser(description="Forecast carbon dioxide in the air.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--root", type=Path, default=Path("runs/forecasting"), help="(default: runs/forecasting)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)

    seed_everything(0)
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        global_batch_size=GLOBAL_BATCH,
        default_root_dir=args.root,
        fast_dev_run=4 if args.smoke else False,
    )
    model, data = NLinear(), CarbonDioxide()
    trainer.fit(model, datamodule=data, ckpt_path="auto")
    [result] = trainer.test(model, datamodule=data, verbose=False)
    trainer.print(f"mean error {result['error']:.2f} ppm; of last year's weeks, risen: {result['naive_error']:.2f} ppm")
    trainer.print(f"{result['inside']:.0%} of the weeks are inside of what was to hold 80%")


if __name__ == "__main__":
    main()
