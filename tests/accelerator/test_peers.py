"""Where other accelerators fail with data and steps: what must be here instead, through `prepare`.

The other lines stand with what they test: gather_for_metrics in test_gather_for_metrics.py; leaving an evaluation
early, schedulers, the last window and Join in test_accelerator.py and test_ranks.py; the batch-size finder in
test_memory.py; reduce, gather_object and checked mode in tests/distributed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from instep import Accelerator, seed_everything
from instep.distributed import gather_object
from tests.helpers.spawn import run_ranks

pytestmark = pytest.mark.dist


class Augmented(Dataset[Any]):
    """Samples that are nothing but random draws, of all three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)


def draws(workers: int) -> list[list[Any]]:
    seed_everything(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    _, loader = accelerator.prepare(
        torch.optim.SGD(model.parameters(), 0.1), DataLoader(Augmented(), 3, num_workers=workers)
    )
    found = gather_object([torch.cat(list(loader)).tolist()])
    accelerator.free_memory()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_draw_different_augmentations(workers: int) -> None:
    one, other = run_ranks(draws, 2, workers)[0]
    for column in range(3):
        assert {row[column] for row in one}.isdisjoint(row[column] for row in other)


def batches_of_a_batch_sampler() -> tuple[list[list[int]], list[float]]:
    own = [[0, 1], [2, 3], [4]]
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.arange(5).float())
    loader = accelerator.prepare(DataLoader(data, batch_sampler=own))
    rows = [row for (x,) in loader for row in accelerator.gather_for_metrics(x).tolist()]
    accelerator.free_memory()
    return own, rows


def test_the_users_batch_lists_are_not_changed() -> None:
    for own, rows in run_ranks(batches_of_a_batch_sampler, 2):
        assert own == [[0, 1], [2, 3], [4]]
        assert rows == [0, 1, 2, 3, 4]


def rows_of_a_distributed_sampler() -> list[list[float]]:
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.arange(8).float())
    sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index, shuffle=False)
    loader = accelerator.prepare(DataLoader(data, 2, sampler=sampler))
    found = gather_object([[row for (x,) in loader for row in x.tolist()]])
    accelerator.free_memory()
    return found


def test_a_users_distributed_sampler_is_not_sharded_again() -> None:
    assert run_ranks(rows_of_a_distributed_sampler, 2)[0] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def learning_rates() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = DataLoader(TensorDataset(torch.arange(12).float()), 2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = []
    for (x,) in loader:
        accelerator.backward(model(x[:, None]).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(schedule.get_last_lr()[0])
    accelerator.free_memory()
    return found


def test_a_schedule_moves_once_per_step_on_any_number_of_processes() -> None:
    assert run_ranks(learning_rates, 2) == [[0.5, 0.25, 0.125]] * 2
    assert run_ranks(learning_rates, 3) == [[0.5, 0.25]] * 3
