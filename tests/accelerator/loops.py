"""Handwritten loops and the Trainer's run that they must equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Trainer, TrainModule, seed_everything


@dataclass(frozen=True)
class Case:
    """One way to train: 22 samples are no multiple of the batch, nor of the window."""

    accumulate: int = 1
    clip: float | None = 0.05
    dropout: float = 0.3
    workers: int = 0
    epochs: int = 2
    samples: int = 22
    batch_size: int = 4
    precision: str = "no"


class Net(nn.Module):
    """A small network with dropout."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def data(case: Case) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(case.samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), case.batch_size, shuffle=True, num_workers=case.workers)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def by_hand(case: Case, stop_after: int | None = None, resume: Path | None = None, save: Path | None = None) -> Any:
    """Train with the Accelerator; the weights, as lists.

    Args:
        case: how.
        stop_after: leave after so many optimizer steps.
        resume: a state to start from.
        save: where to save when it is left.
    """
    seed_everything(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate, mixed_precision=case.precision)
    model = Net(case.dropout)
    optimizer = sgd(model)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, data(case), decay(optimizer))
    if resume is not None:
        accelerator.load_state(resume)
    for _ in range(loader.next_epoch, case.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                if case.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.step == stop_after:
                assert save is not None
                accelerator.save_state(save)
                return result(accelerator, model)
    return result(accelerator, model)


def result(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    weights = {name: p.detach().tolist() for name, p in accelerator.unwrap_model(model).named_parameters()}
    steps = accelerator.step
    accelerator.free_memory()
    return {"weights": weights, "steps": steps}


class Module(TrainModule):
    """The same as a TrainModule."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = Net(case.dropout)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay(optimizer), "interval": "step"}}


def by_trainer(case: Case) -> dict[str, Any]:
    """Train with the Trainer; the weights, as lists."""
    seed_everything(3)
    module = Module(case)
    trainer = Trainer(
        accelerator="cpu",
        devices="auto",
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(case))
    weights = {name: p.detach().tolist() for name, p in module.net.named_parameters()}
    return {"weights": weights, "steps": trainer.global_step}


def both(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return by_hand(case), by_trainer(case)
