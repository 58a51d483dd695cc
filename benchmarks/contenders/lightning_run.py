"""Lightning's Trainer, with the same settings as instep's."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from workload import loss_of, regression

from contenders import Save


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """`bare` and `log` without logger, bar, summary and checkpoints; `everything` with all of them."""
    lightning: Any = import_module("lightning.pytorch")
    loggers: Any = import_module("lightning.pytorch.loggers")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    everything = case == "everything"

    Regression = regression(lightning.LightningModule)

    class LoggingRegression(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.net, batch)
            self.log("loss", loss, prog_bar=everything)
            return loss

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=root,
        log_every_n_steps=log_every_n_steps,
        logger=[loggers.TensorBoardLogger(root), loggers.CSVLogger(root)] if everything else False,
        callbacks=[lightning.callbacks.ModelCheckpoint()] if everything else None,
        enable_checkpointing=everything,
        enable_progress_bar=everything,
        enable_model_summary=everything,
    )
    trainer.fit(Regression() if case == "bare" else LoggingRegression(), loader)
    return trainer.save_checkpoint
