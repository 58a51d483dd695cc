from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.accelerator import Accelerator
from instep.accelerator.local_sgd import LocalSGD
from instep.distributed import gather, gather_object
from instep.errors import DistributedError, SettingError
from tests.helpers.spawn import run_ranks


def start(**settings: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True, **settings)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return (accelerator, *accelerator.prepare(model, optimizer))


def batches(rank: int, count: int) -> list[Tensor]:
    return list(torch.randn(count, 6, 4, generator=torch.Generator().manual_seed(10 + rank)))


def state_of(model: nn.Module) -> Tensor:
    """Everything that is averaged, in one vector."""
    module = model.module if hasattr(model, "module") else model
    floats = [b for b in module.buffers() if b.is_floating_point()]
    return torch.cat([t.detach().flatten() for t in (*module.parameters(), *floats)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def train(count: int, every: int, enabled: bool = True) -> list[bool]:
    """Whether the ranks' weights were equal after each step, and after the block."""
    accelerator, model, optimizer = start()
    equal = []
    with LocalSGD(accelerator, model, every, enabled) as local:
        for batch in batches(accelerator.process_index, count):
            step(model, optimizer, batch)
            local.step()
            equal.append(alike(model))
    equal.append(alike(model))
    step(model, optimizer, batches(accelerator.process_index, 1)[0])
    equal.append(torch.equal(*(parameters_of(model))))  # gradients are averaged again
    return equal


def alike(model: nn.Module) -> bool:
    first, second = gather(state_of(model)[None])
    return torch.equal(first, second)


def parameters_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    vector = torch.cat([p.detach().flatten() for p in model.parameters()])
    first, second = gather(vector[None])
    return first, second


def mean_by_hand(every: int) -> tuple[Tensor, Tensor]:
    """What LocalSGD ends with, and the mean of what each rank gets by itself."""
    accelerator, model, optimizer = start()
    rank = accelerator.process_index
    with LocalSGD(accelerator, model, every):
        for batch in batches(rank, 3):
            step(model, optimizer, batch)
    ends = []
    for other in range(2):
        torch.manual_seed(1)
        alone = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        alone[0].bias.requires_grad_(False)
        sgd = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1)
        for batch in batches(other, 3):
            step(alone, sgd, batch)
        ends.append(state_of(alone))
    return state_of(model), (ends[0] + ends[1]) / 2


def uneven() -> str:
    accelerator, model, optimizer = start()
    rank = accelerator.process_index
    try:
        with LocalSGD(accelerator, model, 2) as local:
            for _ in range(2 if rank == 0 else 1):
                local.step()
    except DistributedError as error:
        return str(error)
    return "nothing was raised"


def fails_alone() -> list[int]:
    """An error inside the block must not meet the other rank's average."""
    accelerator, model, _ = start()
    with pytest.raises(KeyError), LocalSGD(accelerator, model, 2):
        raise KeyError
    return gather_object(accelerator.process_index)


def accumulated() -> tuple[int, list[bool]]:
    accelerator, model, optimizer = start(gradient_accumulation_steps=2)
    equal = []
    with LocalSGD(accelerator, model, 1) as local:
        for batch in batches(accelerator.process_index, 4):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            equal.append(alike(model))
    accelerator.end_training()
    return local.steps, equal


def sharded() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    mesh = init_device_mesh("cpu", (accelerator.num_processes,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(SettingError) as caught:
        LocalSGD(accelerator, model, 2)
    return str(caught.value)


def all_cases() -> dict[str, Any]:
    return {
        "every 2": train(5, 2),
        "disabled": train(2, 2, enabled=False),
        "mean": mean_by_hand(8),
        "uneven": uneven(),
        "error": fails_alone(),
        "accumulated": accumulated(),
        "sharded": sharded(),
    }


@pytest.mark.dist
def test_local_sgd_on_two_ranks() -> None:
    for results in run_ranks(all_cases, 2):
        assert results["every 2"] == [False, True, False, True, False, True, True]
        # Buffers stay each rank's under plain DDP until the next forward.
        assert results["disabled"][-1] is True
        got, expected = results["mean"]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
        assert "took different numbers of optimizer steps when they met: [2, 1] by rank" in results["uneven"]
        assert results["error"] == [0, 1]
        assert results["accumulated"] == (2, [False, True, False, True])
        assert "weight is sharded over ranks" in results["sharded"]


def test_one_process_trains_as_it_would_without() -> None:
    ends = []
    for inside in (True, False):
        accelerator, model, optimizer = start()
        with LocalSGD(accelerator, model, 1, enabled=inside) as local:
            for batch in batches(0, 3):
                step(model, optimizer, batch)
                local.step()
        ends.append(state_of(model))
    assert torch.equal(*ends)


def test_the_number_of_steps_is_checked() -> None:
    for wrong in (0, 1.5, True):
        with pytest.raises(SettingError, match=r"local_sgd_steps="):
            LocalSGD(SimpleNamespace(num_processes=1), nn.Linear(1, 1), wrong)  # type: ignore[arg-type]
