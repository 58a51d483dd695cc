"""A module with everything that a trial must put back, and data whose batch size is an attribute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from instep import DataModule, TrainModule
from tests.trainer.toys import quiet

SAMPLES = 120


class Noisy(Dataset[Any]):
    """Regression data with augmentation by python's and torch's generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.01 * random.random() + 0.01 * torch.randn(4), self.x[index].sum()


class Data(DataModule):
    def __init__(self, batch_size: int = 4, loaders: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaders = loaders

    def setup(self, stage: str) -> None:
        self.data = Noisy()

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        plain = TensorDataset(self.data.x, self.data.x.sum(1))
        return [DataLoader(plain, self.hparams.batch_size) for _ in range(self.loaders)]

    test_dataloader = predict_dataloader = val_dataloader


class _Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.now:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (in a backward)")
        return gradients[0], None


class Model(TrainModule):
    """Dropout, BatchNorm, plain attributes, a schedule; on one rank memory runs out above `limit` samples."""

    def __init__(self, lr: float = 0.1, limit: int = 10**9, where: str = "", on_rank: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.limit, self.where, self.on_rank = limit, where, on_rank
        self.seen: list[float] = []
        self.counts = {"steps": 0}
        self.running = torch.zeros(1)
        self.generators: Any = [torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)]

    def short(self, x: Tensor, where: str) -> bool:
        return len(x) > self.limit and self.where == where and self.global_rank == self.on_rank

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.short(x, "forward"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        hidden = self.net[:2](x)
        hidden = _Explodes.apply(hidden, self.short(x, "backward"))
        return nn.functional.mse_loss(self.net[2:](hidden).squeeze(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        own, pythons, numpys = self.generators
        self.seen.append(float(batch[0].sum() + torch.rand(1, generator=own)) + pythons.random() + numpys.random())
        self.counts["steps"] += 1
        self.running += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.short(batch[0], "validation"):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def everything(trainer: Any, module: Model) -> Iterator[tuple[str, Any]]:
    """What a run has come to, as plain values, by name; collective where the weights are sharded."""
    from instep.utils.seed import rng_state

    for name, value in module.state_dict().items():
        yield name, (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
    yield (
        "optimizer",
        [
            (value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)).tolist()
            for state in trainer.optimizers[0].state.values()
            for value in state.values()
        ],
    )
    yield "rates", [group["lr"] for group in trainer.optimizers[0].param_groups]
    yield "attributes", [module.seen, module.counts, module.running.tolist()]
    yield "metrics", {name: float(value) for name, value in trainer.callback_metrics.items()}
    yield "place", trainer.position.state_dict()
    state = rng_state()
    yield "random", [state["python"], state["torch"].tolist()]


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names whose values differ between two runs."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


def trained(trainer: Any, module: Model, data: Data) -> dict[str, Any]:
    trainer.fit(module, datamodule=data)
    return dict(everything(trainer, module))


__all__ = ["SAMPLES", "Data", "Model", "Noisy", "different", "everything", "quiet", "trained"]
