"""TensorBoard's page of a run of ours, in a browser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from instep import Trainer
from instep.loggers import TensorBoardLogger
from tests.helpers.browser import PORT, browse, serve
from tests.trainer.toys import Toy, loader

pytestmark = pytest.mark.browser


class Net(Toy):
    def __init__(self, lr: float = 0.0625, width: int = 321) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/curve", loss)
        return loss


def train(folder: Path) -> None:
    logger = TensorBoardLogger(folder, name="digits", version="first-run")
    trainer = Trainer(max_epochs=3, logger=logger, log_every_n_steps=1, enable_progress_bar=False, accelerator="cpu")
    trainer.fit(Net(), loader())


def test_run_curve_and_hyperparameters_are_on_the_page(tmp_path):
    train(tmp_path)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", tmp_path, "--port", PORT, "--load_fast", "false"]
    with serve(command) as url, browse() as browser:
        page = browser.open(f"{url}/?tagFilter=train%2Fcurve#timeseries")
        card = page.locator("scalar-card")
        card.get_by_text("train/curve").wait_for()
        card.get_by_text("digits/first-run").wait_for()
        chart = card.locator("line-chart .series-view")
        chart.locator("canvas").wait_for()
        browser.wait_drawn(chart, 0.5)
        page = browser.open(f"{url}/#hparams")
        for text in ("digits/first-run", "lr", "0.062500", "width", "321.00", "train/curve"):
            page.get_by_text(text, exact=True).first.wait_for()
