"""A training program that writes down what each step did; test_replay.py repeats some of its steps."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from instep import Trainer, seed_everything
from instep.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from instep.loggers import CSVLogger
from tests.trainer.resuming import Augmented, Net, Plain


class Diary(Callback):
    """One line for each batch: step, loss and gradient norm as hexadecimal floats, and the samples' indices."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.norm = float(torch.nn.utils.get_total_norm(gradients)).hex()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        line = [trainer.global_step, batch_idx, outputs["loss"].item().hex(), batch[2].tolist()]
        stepped = trainer.position.batch == trainer.position.window_batch
        with open(f"{self.path}-{trainer.global_rank}", "a") as file:
            file.write(json.dumps([*line, self.norm if stepped else None]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(3)
    print("a line of the program")
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices if args.devices == "auto" else int(args.devices),
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=CSVLogger(),
        default_root_dir="out",  # from where it was started
        log_every_n_steps=1,
        val_check_interval=2,
        callbacks=[
            EarlyStopping("val_loss", patience=50),
            ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
            ModelCheckpoint(monitor="val_loss"),
            LearningRateMonitor(),
            *([Diary(Path(os.environ["DIARY"]))] if "DIARY" in os.environ else []),
        ],
    )
    module = Net()
    train = DataLoader(Augmented(42), batch_size=4, shuffle=True, num_workers=2)
    trainer.fit(module, train, DataLoader(Plain(7), batch_size=3), ckpt_path="auto")
    Path("later").write_text("the program went on after fit")


if __name__ == "__main__":
    main()
