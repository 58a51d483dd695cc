from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from instep.data.plan import derive, derive_phases
from instep.errors import SettingError
from tests.trainer.resuming import StepLosses
from tests.trainer.toys import Toy, quiet


@pytest.mark.parametrize(
    "global_batch, world, loader, expected",
    [
        (64, 1, 64, (64, 1)),
        (64, 2, 64, (32, 1)),
        (256, 4, 32, (32, 2)),
        (256, 1, 32, (32, 8)),
        (96, 2, 20, (16, 3)),
        (30, 1, 8, (6, 5)),
        (7, 1, 4, (1, 7)),
        (4, 4, 32, (1, 1)),
    ],
)
def test_the_global_batch_gives_batch_size_and_accumulation_as_the_table_says(global_batch, world, loader, expected):
    assert derive(global_batch, world, loader) == expected


@pytest.mark.parametrize(
    "global_batch, world, nearest", [(10, 4, "8 or 12"), (3, 8, "Nearest: 8"), (65, 2, "64 or 66")]
)
def test_what_does_not_divide_names_the_nearest_sizes(global_batch, world, nearest):
    with pytest.raises(SettingError, match=nearest) as caught:
        derive(global_batch, world, 32)
    assert (caught.value.field, caught.value.got) == ("global_batch_size", global_batch)


@given(per_rank=st.integers(1, 300), world=st.integers(1, 16), loader=st.integers(1, 64))
def test_the_split_is_exact_and_has_the_fewest_micro_batches(per_rank, world, loader):
    micro, accumulate = derive(per_rank * world, world, loader)
    assert micro * accumulate * world == per_rank * world
    assert micro <= loader
    assert all(per_rank % fewer or per_rank // fewer > loader for fewer in range(1, accumulate))


# ---- a global batch that grows over the run


@pytest.mark.parametrize(
    "sizes, world, loader, expected",
    [
        ({0: 64, 1000: 256}, 1, 64, (64, {0: 1, 1000: 4})),
        ({0: 64, 1000: 256}, 2, 128, (32, {0: 1, 1000: 4})),
        ({0: 8, 2: 12, 4: 20}, 2, 64, (2, {0: 2, 2: 3, 4: 5})),
        ({0: 16, 2: 4}, 1, 8, (4, {0: 4, 2: 1})),
    ],
)
def test_micro_batches_stay_while_their_number_grows(sizes, world, loader, expected):
    assert derive_phases(sizes, world, loader) == expected


SIZES = {0: 4, 3: 8, 5: 16}
WINDOWS = [4, 4, 4, 8, 8, 16, 1, 16, 16, 13, 16, 16, 13]  # of three epochs of 45 samples


class Kept(Toy):
    """Keeps the accumulation that hooks see."""

    def on_fit_start(self) -> None:
        self.accumulated = []
        self.estimated = self.trainer.estimated_stepping_batches

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.accumulated.append(self.trainer.accumulate_grad_batches)


def samples() -> TensorDataset:
    x = torch.randn(45, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1))


def grow() -> tuple[list[float], list[int], float]:
    torch.manual_seed(5)
    module, losses = Kept(), StepLosses()
    trainer = quiet(max_epochs=3, global_batch_size={5: 16, 0: 4, 3: 8}, callbacks=[losses])
    assert trainer.global_batch_size == SIZES
    trainer.fit(module, DataLoader(samples(), batch_size=4))
    assert trainer.global_step == len(WINDOWS) == module.estimated == trainer.estimated_stepping_batches
    return losses.values, module.accumulated, float(module.layer.weight.detach().double().sum())


def by_hand() -> tuple[list[float], float]:
    torch.manual_seed(5)
    module, losses, done = Toy(), [], 0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = samples().tensors
    for size in WINDOWS:
        loss = module.loss((x[done : done + size], y[done : done + size]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        done = (done + size) % 45
    return losses, float(module.layer.weight.detach().double().sum())


def test_steps_are_of_the_sizes_that_were_asked_for() -> None:
    """Each window is the mean over its own samples, at its epoch's end too.

    On ranks: test_a_run_resumes_at_another_world_size.
    """
    losses, weight = by_hand()
    got = grow()
    assert got[0] == pytest.approx(losses, abs=1e-5)
    assert got[1] == [1] * 3 + [2] * 4 + [4] * 5 + [4] * 24
    assert got[2] == pytest.approx(weight, abs=1e-5)
