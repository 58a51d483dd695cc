"""Runs that are counted, and what they must have counted: the lengths of the samples that each step has trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from instep import PartialState, Trainer, TrainModule
from instep.callbacks import Callback
from instep.distributed import gather_object
from instep.units import Samples, Tokens

SIZE = 12


def length(index: int) -> int:
    """Tokens of a sample, from 1 to 11."""
    return index * 7 % 11 + 1


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of unlike lengths, padded to `SIZE`."""

    def __init__(self, samples: int = 23) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        there = torch.arange(SIZE) < length(index)
        return {
            "index": torch.tensor(index),
            "x": torch.linspace(0.1, 1.0, SIZE) * there * (index % 5 + 1) / 5,
            "attention_mask": there.long(),
            "labels": torch.where(there, 3, -100),
        }


class Uneven(IterableDataset[dict[str, Tensor]]):
    """Data that each rank reads for itself: rank r has 5 + 4 * r sequences."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rank, sequences = PartialState().process_index, Sequences(100)
        for number in range(5 + 4 * rank):
            yield sequences[10 * rank + number]


class Model(TrainModule):
    """A linear regression of the mean of a sequence; it notes the rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(SIZE, 1)
        self.schedule: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch["x"]).squeeze(-1) - batch["x"].mean(-1)).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch["x"]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer, self.trainer)])


class Seen(Callback):
    """What happened at each step: the total that was counted, the samples, the rate, validations."""

    def __init__(self, counter: Tokens | Samples) -> None:
        self.counter = counter
        self.totals: dict[int, int] = {}
        self.samples: dict[int, list[int]] = {}
        self.rates: dict[int, float] = {}
        self.validated: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        at = trainer.position
        ends = at.batch == at.window_batch
        step = at.global_step + (not ends)
        self.samples.setdefault(step, []).extend([] if trainer.batch_weight == 0 else batch["index"].tolist())
        if ends:
            self.totals[step] = self.counter.total
            self.rates[step] = trainer.optimizers[0].param_groups[0]["lr"]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)

    def of_all_ranks(self) -> dict[int, list[int]]:
        """Return the samples of each step on all ranks. Collective."""
        every = gather_object(self.samples)
        return {step: sorted(index for rank in every for index in rank[step]) for step in self.samples}


def trainer_for(*callbacks: Any, **settings: Any) -> Trainer:
    """A Trainer on the CPU that prints and logs nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {**quiet, "accelerator": "cpu", "enable_model_summary": False, "max_epochs": -1, **settings}
    return Trainer(callbacks=list(callbacks), num_sanity_val_steps=0, **settings)


def batches(samples: int = 23, batch_size: int = 2, shuffle: bool = True) -> DataLoader[Any]:
    """A loader of sequences."""
    return DataLoader(Sequences(samples), batch_size=batch_size, shuffle=shuffle)
