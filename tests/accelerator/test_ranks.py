"""The Accelerator on several real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, GradientState
from instep.accelerator import DataLoaderConfiguration, DistributedDataParallelKwargs
from instep.distributed import gather_object
from instep.errors import StateError
from tests.accelerator.loops import Net
from tests.helpers.spawn import RanksFailed, run_ranks

pytestmark = pytest.mark.dist


def numbers(length: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length).float()), batch_size, **options)


def gradients_of(length: int, accumulate: int, items: bool) -> list[float]:
    """The gradient of each step of a model whose gradient is the mean of its inputs."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, batches = accelerator.prepare(model, optimizer, numbers(length, 4 // accelerator.num_processes))
    found: list[float] = []
    weight = accelerator.unwrap_model(model).weight
    optimizer.optimizer.register_step_pre_hook(lambda *_: found.append(weight.grad.item()))
    for (x,) in batches:
        with accelerator.accumulate(model):
            source = batches.source
            replayed = source.share.mine == 0
            if items:
                loss = model(x[:, None]).mean()
                accelerator.backward(loss, num_items=0 if replayed else len(x))
            else:
                accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return found


CASES = [(length, accumulate, items) for length, accumulate in ((16, 1), (17, 2), (21, 3)) for items in (False, True)]


def gradients_of_all() -> list[list[float]]:
    return [gradients_of(*case) for case in CASES]


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_is_the_mean_over_all_its_samples_on_any_number_of_processes(world: int) -> None:
    ranks = run_ranks(gradients_of_all, world)
    for number, (length, accumulate, _) in enumerate(CASES):
        window = 4 * accumulate
        parts = [torch.arange(length).float()[at : at + window] for at in range(0, length, window)]
        for found in ranks:
            assert found[number] == pytest.approx([part.mean().item() for part in parts]), CASES[number]


def windows_after_leaving_evaluations_early() -> list[bool]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    model, optimizer, train, val = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), numbers(24, 2), numbers(9, 2)
    )
    ends = []
    for _ in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).mean())
            optimizer.step()
            optimizer.zero_grad()
        ends.append(GradientState().sync_gradients)
        for _ in val:
            break
    accelerator.free_memory()
    return ends


def test_leaving_an_evaluation_early_moves_no_window() -> None:
    assert run_ranks(windows_after_leaving_evaluations_early, 2) == [[False, True] * 3] * 2


def set_by(setter: int, blocking: bool) -> int:
    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), numbers(400, 2))
    for _ in loader:
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.process_index == setter and accelerator.step == 5:
            accelerator.set_trigger("enough")
        if blocking:
            stop = accelerator.check_trigger("enough")
        else:
            stop = any(trigger.name == "enough" for trigger in accelerator.triggers.tick(accelerator.step))
        if stop:
            break
    step = accelerator.step
    accelerator.end_training()
    return step


def set_by_each() -> dict[bool, list[int]]:
    return {blocking: [set_by(setter, blocking) for setter in range(3)] for blocking in (True, False)}


def test_a_trigger_of_any_rank_stops_all_at_one_step() -> None:
    first, *others = run_ranks(set_by_each, 3)
    assert others == [first, first]
    assert first[True] == [5, 5, 5]
    assert all(5 <= step < 66 for step in first[False])


def uneven() -> tuple[int, list[float], bool]:
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), numbers(9, 2))
    steps = 0
    with accelerator.join_uneven_inputs([accelerator.unwrap_model(model)]):
        for (x,) in loader:
            accelerator.backward(model(x[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    accelerator.wait_for_everyone()
    weights = [p.item() for p in accelerator.unwrap_model(model).parameters()]
    wrapped = isinstance(model, DistributedDataParallel)
    accelerator.end_training()
    return steps, weights, wrapped


def test_ranks_without_data_wait_in_join() -> None:
    results = run_ranks(uneven, 2)
    assert [steps for steps, _, _ in results] == [3, 2]
    assert results[0][1] == results[1][1]
    assert all(wrapped for _, _, wrapped in results)


def compressed() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    handler = DistributedDataParallelKwargs(comm_hook="fp16")
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    model = nn.Linear(3, 1)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.rand(4, 3) + accelerator.process_index).mean())
    grad = accelerator.unwrap_model(model).weight.grad
    accelerator.free_memory()
    return grad.flatten().tolist(), grad.half().float().flatten().tolist()


def test_gradients_travel_as_the_comm_hook_says() -> None:
    (one, rounded), (other, _) = run_ranks(compressed, 2)
    assert one == other
    assert one == rounded


def dispatched() -> list[Any]:
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(numbers(11, 3))
    seen = [x.tolist() for (x,) in loader]
    everyone = gather_object([seen])
    accelerator.free_memory()
    return everyone


def test_dispatched_batches_are_shared_out() -> None:
    [one, other] = run_ranks(dispatched, 2)[0]
    flat = [x for pair in zip(one, other, strict=True) for part in pair for x in part]
    assert sorted(set(flat)) == [float(i) for i in range(11)]


def loss_apart() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    other = torch.zeros((), requires_grad=True)
    accelerator.backward(model(torch.ones(1, 1)).sum() if accelerator.is_main_process else other)


def test_a_loss_that_no_model_gave_is_an_error() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(loss_apart, 2)
    assert "a loss that depends on no parameter. With several processes" in failed.value.errors[1]


def state_after_the_end() -> int:
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    assert accelerator.is_main_process == (accelerator.process_index == 0)  # still known
    with pytest.raises(StateError):
        accelerator.wait_for_everyone()
    accelerator.end_training()  # twice is once
    again = Accelerator(cpu=True)
    total = int(again.reduce(torch.tensor(1)))
    again.end_training()
    return total


def test_after_end_training_a_new_accelerator_connects_both_ranks() -> None:
    assert run_ranks(state_after_the_end, 2) == [2, 2]
