"""The training of `instep test`: a net that is small and not too fast to save, and the same by hand."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep.callbacks import Callback
from instep.state import PartialState
from instep.trainer import Trainer, TrainModule

_FEATURES, _HIDDEN = 64, 16384  # 1,081,345 parameters: enough bytes for a checkpoint's bandwidth
BATCHES, _PER_RANK, EPOCHS = 4, 8, 3

QUIET: dict[str, Any] = {
    "max_epochs": EPOCHS,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(TrainModule):
    """One hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return _optimizer(self.net)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)


def _data(world: int) -> TensorDataset:
    x = torch.randn(BATCHES * _PER_RANK * world, _FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.mean(dim=1, keepdim=True))


class Watch(Callback):
    """Notes the epochs' losses, and saves after the last but one."""

    def __init__(self, save_to: Path | None = None) -> None:
        self.losses: list[float] = []
        self.saved: Path | None = None
        self.save_s = 0.0
        self.first_step = 0
        self._save_to = save_to

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if self._save_to is not None and trainer.current_epoch == EPOCHS - 2:
            started = time.perf_counter()
            self.saved = trainer.save_checkpoint(self._save_to)
            self.save_s = time.perf_counter() - started


def fit(state: PartialState, root: Path, watch: Watch, ckpt_path: Path | None = None) -> None:
    """Train under what the environment asks for, from a checkpoint where one is given. Collective."""
    settings = {**QUIET, "default_root_dir": root, "callbacks": [watch]}
    world = state.num_processes
    trainer = Trainer(**settings, num_nodes=state.num_nodes, global_batch_size=_PER_RANK * world)
    with contextlib.redirect_stdout(io.StringIO()):  # how each fit ended is of no interest
        trainer.fit(Net(), DataLoader(_data(world), _PER_RANK * world), ckpt_path=ckpt_path)


def losses_of_one_process(world: int) -> list[float]:
    """Each epoch's mean loss, of a loop by hand on the CPU with the whole global batch."""
    net = Net().net
    optimizer = _optimizer(net)
    losses = []
    for _ in range(EPOCHS):
        of_epoch = []
        for x, y in DataLoader(_data(world), _PER_RANK * world):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            of_epoch.append(float(loss.detach()))
        losses.append(sum(of_epoch) / len(of_epoch))
    return losses
