"""Small modules, data and Trainers for the tests of the loop."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from instep import Trainer, TrainModule

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet(**settings: Any) -> Trainer:
    """A Trainer that writes nothing unless it is asked to."""
    return Trainer(**{**QUIET, **settings})


class Toy(TrainModule):
    """A linear regression that logs nothing; `seen` holds the first feature of the samples of every training batch."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 1)
        self.seen: list[list[float]] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x).squeeze(-1), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0][:, 0].tolist())
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.layer(batch[0]).squeeze(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class LoggingToy(Toy):
    """Logs the loss of every stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test_loss", self.loss(batch))


class ScoredToy(Toy):
    """Logs a score after each validation of fit: the entry of the epoch, under the name `metric`."""

    def __init__(self, scores: Sequence[Any], metric: str = "score") -> None:
        super().__init__()
        self.scores, self.metric = scores, metric

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log(self.metric, self.scores[self.current_epoch])


class SkippingToy(Toy):
    """Returns no loss for the batches with an index in `skipped`."""

    skipped: Container[int] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


class FailingToy(Toy):
    """Raises a ValueError, "no more", in the training step that follows `fails_at` optimizer steps."""

    fails_at = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


class ManualToy(Toy):
    """Optimizes manually: one step for each batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class DeepToy(Toy):
    """Two linear layers, with the same weights in each object."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))  # type: ignore[assignment]


class WiderToy(Toy):
    """Has a layer that checkpoints of a `Toy` lack."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


class KeepingToy(Toy):
    """Keeps any value as a hyperparameter."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class BareToy(TrainModule):
    """One linear layer and a training step; it saves no hyperparameters and logs nothing."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dim_zero_sum(states: Tensor) -> Tensor:
    """Sum over ranks: states say by a function of this name, torchmetrics', how they are reduced."""
    return states.sum(0)


class Mean(nn.Module):
    """A metric object like those of torchmetrics: a state of tensors, computed over all ranks.

    A rank or a program that imports torchmetrics itself waits for it longer than for torch.
    """

    _reductions: ClassVar[dict[str, Any]] = {"total": dim_zero_sum, "count": dim_zero_sum}

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    @property
    def metric_state(self) -> dict[str, Tensor]:
        """What has been counted since the last reset."""
        return {"total": self.total, "count": self.count}

    def update(self, value: Any) -> None:
        """Count a tensor's elements."""
        values = torch.as_tensor(value, dtype=torch.float32)
        self.total, self.count = self.total + values.sum(), self.count + values.numel()
        self._update_count += 1

    def compute(self) -> Tensor:
        """The mean over all ranks."""
        sums = torch.stack([self.total, self.count])
        if dist.is_initialized():
            dist.all_reduce(sums)
        return sums[0] / sums[1]

    def reset(self) -> None:
        """Start anew."""
        self.total, self.count = torch.zeros(()), torch.zeros(())
        self._update_count = 0


def samples(length: int = 12, seed: int = 0) -> TensorDataset:
    """`length` samples of four features and a target; the first feature is the sample's number."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(length, 4, generator=generator), torch.randn(length, generator=generator)
    x[:, 0] = torch.arange(length) / length
    return TensorDataset(x, y)


def loader(length: int = 12, batch_size: int = 3, shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    """Four batches by default."""
    return DataLoader(samples(length), batch_size, shuffle=shuffle, **options)


class Stream(IterableDataset[Any]):
    """The same samples without a length."""

    def __init__(self, length: int = 12) -> None:
        self.samples: Dataset[Any] = samples(length)
        self.length = length

    def __iter__(self) -> Any:
        return (self.samples[i] for i in range(self.length))


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
