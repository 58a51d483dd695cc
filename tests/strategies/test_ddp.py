from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instep import TrainModule
from instep.distributed import gather
from instep.errors import DistributedError, SettingError
from instep.state import PartialState
from instep.strategies import DDPStrategy, Precision, Strategy
from tests.helpers.spawn import run_ranks
from tests.trainer.test_ranks import loader, quiet
from tests.trainer.toys import Toy, samples
from tests.trainer.toys import loader as toy_loader


def test_a_rank_without_its_group_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 1)
    DDPStrategy().setup(module, [])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="one of 2, but their process group is gone"):
        DDPStrategy().setup(module, [])


class Accumulating(TrainModule):
    """Two batches per step; gradients are noted after every backward."""

    automatic_optimization = False

    def __init__(self, toggled: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        self.toggled = toggled
        self.gradients: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        steps = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=steps) if self.toggled else nullcontext():
            self.manual_backward(self.layer(batch[0]).mean())
        self.gradients.append(self.layer.weight.grad.flatten().tolist())  # type: ignore[union-attr]
        if steps:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(toggled: bool) -> tuple[list[list[float]], list[float]]:
    torch.manual_seed(1)
    module = Accumulating(toggled)
    quiet(max_epochs=1).fit(module, loader(16, 2))
    return module.gradients, module.layer.weight.flatten().tolist()


@pytest.mark.dist
def test_gradients_are_not_reduced_while_accumulating() -> None:
    first, second = run_ranks(train, 2, True)
    assert all((a != b) == (i % 2 == 0) for i, (a, b) in enumerate(zip(first[0], second[0], strict=True)))
    always, _ = run_ranks(train, 2, False)
    assert first[1] == second[1] == pytest.approx(always[1], abs=1e-6)
    assert first[0][1] == pytest.approx(always[0][1], abs=1e-6)


# ---- handwritten loops


def connected(**options: Any) -> DDPStrategy:
    strategy = DDPStrategy(**options)
    device = PartialState(cpu=True).device
    strategy.connect(device, Precision("32-true", device))
    return strategy


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def deep() -> nn.Module:
    """Parameters in several buckets of a small size."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


class Deep(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.layer = deep()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_the_trainer(options: dict[str, Any], accumulate: int) -> Tensor:
    module = Deep()
    strategy = DDPStrategy(bucket_cap_mb=0.01, **options)
    quiet(max_epochs=2, strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=0.5).fit(
        module, toy_loader(32, 4)
    )
    return vector(module)


def by_hand(options: dict[str, Any], accumulate: int) -> Tensor:
    strategy, model = connected(bucket_cap_mb=0.01, **options), deep()
    wrapped = strategy.wrap(model)
    assert isinstance(wrapped, DistributedDataParallel)
    assert strategy.unwrap(wrapped) is strategy.unwrap(model) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = (tensor.view(4, 2, 4, *tensor.shape[1:])[:, strategy.data_rank] for tensor in samples(32).tensors)
    for i in range(8):
        syncs = (i + 1) % accumulate == 0
        with nullcontext() if syncs else strategy.no_sync():
            loss = nn.functional.mse_loss(wrapped(x[i % 4]).squeeze(-1), y[i % 4])
            strategy.backward(loss / accumulate)
        if syncs:
            strategy.clip_gradients(optimizer, 0.5)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
    strategy.teardown()
    return vector(model)


POWER = {"comm_hook": "power_sgd", "comm_state": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}}
HOOKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"comm_hook": "fp16"},
    "power_sgd": POWER,
    "wrapped power_sgd": {**POWER, "comm_wrapper": "fp16"},
    "batched power_sgd": {**POWER, "comm_state": {"start_powerSGD_iter": 2, "batch_tensors_with_same_shape": True}},
}


def both_ways() -> dict[str, tuple[Tensor, Tensor]]:
    found = {name: (by_the_trainer(options, 1), by_hand(options, 1)) for name, options in HOOKS.items()}
    return {**found, "accumulated": (by_the_trainer({}, 2), by_hand({}, 2))}


@pytest.mark.dist
def test_a_handwritten_loop_has_the_trainer_s_bits_under_every_hook() -> None:
    first, second = run_ranks(both_ways, 2, timeout_s=120.0)
    for name, (trainer, by_itself) in first.items():
        assert torch.equal(trainer, by_itself), name
        assert torch.equal(trainer, second[name][0]), f"{name}: ranks differ"
        assert torch.equal(by_itself, second[name][1]), f"{name}: ranks differ"
    plain, start = first["plain"][0], vector(deep())
    for name in HOOKS:
        apart = float((first[name][0] - plain).norm() / (start - plain).norm())
        assert apart == 0 if name == "plain" else 0 < apart < 0.5, f"{name}: {apart} of the way"


def gradients_while_accumulating() -> list[bool]:
    """Whether ranks hold the same gradients after a backward that reduces, and after one that does not."""
    strategy, found = connected(), []
    wrapped = strategy.wrap(deep())
    batch = torch.full((2, 4), float(strategy.data_rank))
    for reduces in (False, True):
        with nullcontext() if reduces else strategy.no_sync():
            strategy.backward(wrapped(batch).mean())
        first, second = gather(torch.cat([p.grad.flatten() for p in wrapped.parameters()])[None])  # type: ignore[union-attr]
        found.append(torch.equal(first, second))
    return found


def frozen() -> tuple[bool, list[float]]:
    strategy = connected()
    module = nn.Linear(1, 1, bias=False).requires_grad_(False)
    nn.init.constant_(module.weight, float(strategy.data_rank + 5))
    return strategy.wrap(module) is module, module.weight.flatten().tolist()


def unsupported() -> list[str]:
    texts = []
    for options in ({"comm_hook": "bf16"}, {**POWER, "comm_state": {"rank": 2}}):
        with pytest.raises(SettingError) as caught:
            connected(**options).wrap(deep())
        texts.append(str(caught.value))
    return texts


def wrap_cases() -> list[Any]:
    return [gradients_while_accumulating(), frozen(), unsupported()]


@pytest.mark.dist
def test_wrap() -> None:
    for reduced, (itself, weight), (bf16, argument) in run_ranks(wrap_cases, 2):
        assert reduced == [False, True]
        assert itself
        assert weight == [5.0]
        assert "comm_hook='bf16'" in bf16
        assert "cannot be used on device cpu" in bf16
        assert "unexpected keyword argument 'rank'" in argument


def test_wrap_in_one_process_is_the_module_itself() -> None:
    for strategy in (Strategy(), connected()):
        module = nn.Linear(2, 1)
        assert strategy.wrap(module) is strategy.unwrap(module) is module


def test_hooks_are_checked_at_construction() -> None:
    with pytest.raises(SettingError, match=r"comm_hook='powersgd'.*Did you mean 'power_sgd'"):
        DDPStrategy(comm_hook="powersgd")
    with pytest.raises(SettingError, match=r"Use comm_hook='power_sgd', with comm_state="):
        DDPStrategy(comm_hook="batched_power_sgd")
    with pytest.raises(SettingError, match=r"comm_wrapper='fp8'.*no, fp16, bf16"):
        DDPStrategy(comm_hook="power_sgd", comm_wrapper="fp8")
    with pytest.raises(SettingError, match=r"comm_wrapper='fp16' belongs to comm_hook='power_sgd'"):
        DDPStrategy(comm_wrapper="fp16")
    with pytest.raises(SettingError, match=r"comm_state=.* belongs to"):
        DDPStrategy(comm_hook="fp16", comm_state={"matrix_approximation_rank": 2})
