"""instep's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from workload import loss_of, regression

from contenders import Save
from instep import Trainer, TrainModule
from instep.callbacks import ModelCheckpoint
from instep.loggers import CSVLogger, TensorBoardLogger

Regression = regression(TrainModule)


class LoggingRegression(Regression):
    """With one log call per step."""

    def __init__(self, prog_bar: bool) -> None:
        super().__init__()
        self.prog_bar: bool = prog_bar

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.log("loss", loss, prog_bar=self.prog_bar)
        return loss


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """`bare` and `log` without logger, bar, summary and checkpoints; `everything` with all of them."""
    everything = case == "everything"
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=root,
        log_every_n_steps=log_every_n_steps,
        logger=[TensorBoardLogger(), CSVLogger()] if everything else False,
        callbacks=[ModelCheckpoint()] if everything else None,
        enable_checkpointing=everything,
        enable_progress_bar=everything,
        enable_model_summary=everything,
    )
    model = Regression() if case == "bare" else LoggingRegression(prog_bar=everything)
    trainer.fit(model, loader)
    return trainer.save_checkpoint
