"""Optimizers of whole matrices: under every way to share weights, what one process does, to the last bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instep.errors import SettingError
from instep.optim import WholeMatrix, whole_matrix
from instep.strategies.dtensors import gather_whole
from instep.utils.optimizer_state import load_optimizer_state, optimizer_state
from tests.helpers.spawn import run_ranks

SIZES = [(16, 33), (33, 16), (16, 64), (64, 10), (10, 16)]  # 33 and 10 do not divide by the ranks
KINDS = ("muon", "preconditioned")
STEPS = 3


class Preconditioned(torch.optim.Optimizer):
    """Keeps a factor of another shape than the weight's beside a moment of its shape, and counts its steps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), left=torch.eye(len(p)), moment=torch.zeros_like(p))
                state["step"] += 1
                state["left"] += p.grad @ p.grad.T
                state["moment"].lerp_(p.grad, 0.1)
                p.add_(torch.linalg.solve(state["left"], state["moment"]), alpha=-group["lr"])


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.02}]
    return torch.optim.Muon(groups) if kind == "muon" else Preconditioned(groups)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in SIZES])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def shared(shape: tuple[int, ...]) -> dict[str, Any]:
    return {kind: shared_by(kind, shape) for kind in KINDS}


def shared_by(kind: str, shape: tuple[int, ...]) -> tuple[list[float], dict[str, Tensor], dict[str, Any], int]:
    """Losses and weights of a run that goes on from its own state after some steps, that state, and its exchanges."""
    torch.set_num_threads(1)  # products are added in one order
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole_matrix.BUCKET_BYTES = 6000  # 3 buckets of the 5 matrices
    exchange, calls = dist.all_to_all_single, []
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(1) or exchange(*args, **kwargs)
    optimizer = WholeMatrix(make(kind, model))
    losses = train(model, optimizer, 0)
    dist.all_to_all_single, count = exchange, len(calls)
    tree = optimizer_state(model, optimizer)
    assert copy.deepcopy(optimizer).state_dict().keys() == optimizer.state_dict().keys()
    state = copy.deepcopy(
        {name: {key: gather_whole(value) for key, value in values.items()} for name, values in tree["state"].items()}
    )
    again = WholeMatrix(make(kind, model))
    load_optimizer_state(model, again, tree)
    assert again.state_dict()["state"][4].keys() == state["4.weight"].keys()  # what was not used yet, too
    losses += train(model, again, STEPS)
    weights = {name: gather_whole(value) for name, value in model.state_dict().items()}
    return losses, weights, {**tree, "state": state}, count


@pytest.mark.dist
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_shared_weights_step_as_whole_ones_do_bit_for_bit(shape: tuple[int, ...]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind, (losses, weights, tree, exchanges) in run_ranks(shared, math.prod(shape), shape)[0].items():
            alone = layers()
            expected = train(alone, make(kind, alone), 0, 2 * STEPS)
            assert losses == expected
            assert all(torch.equal(weights[name], value) for name, value in alone.state_dict().items())
            assert exchanges == STEPS * 3 * 2, "two for each bucket"
            model = layers()  # one process goes on from the state that the ranks have saved
            train(model, make(kind, model), 0)
            plain = make(kind, model)
            load_optimizer_state(model, plain, tree)
            assert train(model, plain, STEPS) == expected[STEPS:]
    finally:
        torch.set_num_threads(threads)


def test_one_process_steps_as_before_with_hooks_once_and_one_name_in_checkpoints() -> None:
    alone, model = layers(), layers()
    optimizer = WholeMatrix(make("muon", model))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert train(model, optimizer, 0) == train(alone, make("muon", alone), 0)
    assert calls == ["before", "after"] * STEPS
    assert optimizer_state(model, optimizer)["optimizer"] == "Muon"
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step(lambda: model(torch.ones(1, 16)).sum())
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.01]


def test_what_is_no_optimizer_or_is_wrapped_already_is_refused() -> None:
    wrapped = WholeMatrix(make("muon", layers()))
    for given in (wrapped, layers()):
        with pytest.raises(SettingError, match="wraps a torch optimizer once"):
            WholeMatrix(given)  # type: ignore[arg-type]
