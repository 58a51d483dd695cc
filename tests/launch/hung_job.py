"""A training whose last rank hangs, in one way or another."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.toys import BareToy, quiet


def stuck_here() -> None:
    threading.Event().wait()


class Model(BareToy):
    def __init__(self, folder: Path, how: str, at: int) -> None:
        super().__init__()
        self.folder, self.how, self.at = folder, how, at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        again = os.environ.get("INSTEP_RESTART", "0") != "0"
        if again and not (self.folder / "restarted").exists():
            (self.folder / "restarted").write_text(str(time.time()))
        if (
            self.trainer.global_rank == self.trainer.world_size - 1
            and self.trainer.global_step == self.at
            and not again
        ):
            (self.folder / "hung").write_text(str(time.time()))
            if self.how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.how == "in Python":
                stuck_here()
            elif self.how == "in C":
                ctypes.PyDLL(None).sleep(10**6)  # with Python's lock held
        return super().training_step(batch, batch_idx)


def train(folder: Path, how: str, hang_timeout_s: float, at: int = 3) -> None:
    trainer = quiet(max_steps=10, hang_timeout_s=hang_timeout_s, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(Model(folder, how, at), DataLoader(TensorDataset(torch.ones(80, 4)), 4))
