"""Modules and data that test_trainer_cli.py configures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import DataModule, TrainModule
from instep.callbacks import Callback
from instep.cli import LRSchedulerCallable, OptimizerCallable
from instep.state import read_environment


class LineData(DataModule):
    """Points of a line.

    Args:
        batch_size: samples per batch.
        samples: how many there are.
    """

    def __init__(self, batch_size: int = 4, samples: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.samples = samples
        self.width = 3

    def _loader(self) -> DataLoader[Any]:
        x = torch.randn(self.samples, self.width, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def double(x: Tensor) -> Tensor:
    return 2 * x


class CalledNet(nn.Module):
    """Has a function, a text, and what may be anything.

    Args:
        function: what it calls.
        text: what it says.
        open: what it has.
    """

    def __init__(self, function: Callable[..., Any] = double, text: str = "", open: Any = None) -> None:
        super().__init__()
        self.function = function
        self.text = text
        self.open = open


class LineNet(TrainModule):
    """A linear layer.

    Args:
        lr: the learning rate.
        batch_size: what the data's is.
        width: of the input.
        loss: between prediction and target.
        sizes: of something.
        folder: of something.
    """

    def __init__(
        self,
        lr: float = 0.1,
        batch_size: int = 1,
        width: int = 3,
        loss: nn.Module | None = None,
        sizes: tuple[int, ...] = (1, 2),
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)
        self.loss = loss or nn.MSELoss()
        self.sizes = sizes
        self.folder = folder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.layer(batch[0]), batch[1]))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(self.layer(batch[0]), batch[1]))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class DeepLineNet(LineNet):
    """A subclass with an argument of its own and no default for it."""

    def __init__(self, depth: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth = depth


class TextNet(LineNet):
    """Has texts of several types."""

    def __init__(
        self, title: str = "none", open: Any = None, kinds: dict[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.title, self.open, self.kinds = title, open, kinds


class InjectedNet(LineNet):
    """Gets its optimizer and schedule as arguments."""

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.SGD,
        scheduler: LRSchedulerCallable | None = None,
        init: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.make_optimizer, self.make_scheduler, self.init = optimizer, scheduler, init

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return optimizer if self.make_scheduler is None else [[optimizer], [self.make_scheduler(optimizer)]]


class Marks(Callback):
    """Remembers what it was made with."""

    def __init__(self, mark: int = 0) -> None:
        self.mark = mark


class Result(Callback):
    """Writes what tests/launch/ways.py compares.

    Args:
        out: the file.
    """

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        from tests.launch.digits_job import digest  # late: reads scikit-learn's images

        if trainer.is_global_zero:
            launcher = read_environment().launcher
            result = {"world_size": trainer.world_size, "launcher": launcher, "step": trainer.global_step}
            self.out.write_text(json.dumps({**result, "weights": digest(module)}))


class PlainNet(TrainModule):
    """A module without arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return LineData().train_dataloader()

    test_dataloader, test_step = train_dataloader, training_step


class LinkedNet(PlainNet):
    """Builds its optimizer and schedule itself, as the configuration says."""

    def __init__(self, scheduler: dict[str, Any], optimizer: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.linked = scheduler, optimizer
