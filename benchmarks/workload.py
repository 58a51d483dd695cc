"""The work that all contenders do: a small MLP on data in memory, under one clock that sits in the loader."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

FEATURES, BATCH = 32, 8
LEARNING_RATE = 0.01


class Clock:
    """Notes something whenever one of certain batches is asked for, whoever asks.

    Whatever a framework does between two batches lies in between; what it does before the first and after the last
    step of the epoch (setting up, saving) does not.

    Args:
        batches: numbers of batches in the epoch.
        note: called when one of them is asked for.
    """

    def __init__(self, batches: Sequence[int], note: Callable[[], Any]) -> None:
        self.notes: list[Any] = []
        self._expected = len(batches)
        self._batches = frozenset(batches)
        self._note = note
        self._batch = 0

    def tick(self) -> None:
        """A batch is asked for."""
        batch = self._batch
        self._batch = batch + 1
        if batch in self._batches:
            self.notes.append(self._note())

    def collate(self, samples: list[Any]) -> Any:
        """The loader's `collate_fn`."""
        self.tick()
        return default_collate(samples)

    def all_notes(self) -> list[Any]:
        """The notes, of all batches that were named."""
        assert len(self.notes) == self._expected, f"the run ended after {self._batch} batches"
        return self.notes


def times() -> tuple[int, int]:
    """Wall time and this process's CPU time, all threads, in nanoseconds."""
    return time.perf_counter_ns(), time.process_time_ns()


def pause() -> tuple[tuple[int, int], tuple[int, int]]:
    """End of a turn: stop this process until it is let go on. The times before and after."""
    before = times()
    os.kill(os.getpid(), signal.SIGSTOP)
    return before, times()


class ReadyBatches:
    """An iterable with a length that gives the same few ready batches again and again: a loader that costs nothing."""

    def __init__(self, batches: list[Any], length: int, clock: Clock) -> None:
        self.batches = batches
        self.length = length
        self.clock = clock

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        batches, tick = self.batches, self.clock.tick
        for i in range(self.length):
            tick()
            yield batches[i % len(batches)]


def make_loader(kind: str, steps: int, clock: Clock) -> Any:
    """The training data of one epoch.

    Args:
        kind: "loader", a shuffling DataLoader over a TensorDataset; or "ready", ready batches.
        steps: batches in the epoch.
        clock: gets a tick per batch.
    """
    generator = torch.Generator().manual_seed(0)
    if kind == "ready":
        x = torch.randn(64, BATCH, FEATURES, generator=generator)
        return ReadyBatches([(b, b.sum(dim=1, keepdim=True)) for b in x], steps, clock)
    x = torch.randn(steps * BATCH, FEATURES, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), BATCH, shuffle=True, collate_fn=clock.collate)


def make_net() -> nn.Module:
    """The MLP 32-32-1."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD, the cheapest step: a loop's own cost is not hidden behind it."""
    return torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    x, y = batch
    return nn.functional.mse_loss(net(x), y)


def regression(base: Any) -> Any:
    """The MLP as a module of a Trainer, without a log call.

    Args:
        base: instep's TrainModule, or Lightning's LightningModule.

    Returns:
        A class; it takes no arguments.
    """

    class Regression(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.net)

    return Regression
