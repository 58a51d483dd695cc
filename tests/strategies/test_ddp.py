from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from instep import TrainModule
from instep.distributed import gather
from instep.errors import DataError, DistributedError, HookError, SettingError, UsageError
from instep.state import PartialState
from instep.strategies import DDPStrategy, Precision, Strategy
from instep.strategies.gradients import parameters_of
from tests.helpers.spawn import run_ranks
from tests.trainer.test_ranks import loader, quiet
from tests.trainer.toys import Toy, samples
from tests.trainer.toys import loader as toy_loader


def test_a_rank_without_its_group_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 1)
    DDPStrategy().prepare_training(module, [])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="one of 2, but their process group is gone"):
        DDPStrategy().prepare_training(module, [])


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


def by_the_trainer(options: dict[str, Any], accumulate: int, module: TrainModule | None = None) -> Tensor:
    module = Deep() if module is None else module
    strategy = DDPStrategy(**{"bucket_cap_mb": 0.01, **options})
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
            strategy.gradients.clip(parameters_of(optimizer), 0.5)
            strategy.gradients.step(optimizer)
            optimizer.zero_grad()
    strategy.teardown()
    return vector(model)


POWER = {"comm_hook": "power_sgd", "comm_state": {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}}
HOOKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"comm_hook": "fp16"},
    "bf16": {"comm_hook": "bf16"},
    "power_sgd": POWER,
    "wrapped power_sgd": {**POWER, "comm_wrapper": "bf16"},
    "batched power_sgd": {**POWER, "comm_state": {"start_powerSGD_iter": 2, "batch_tensors_with_same_shape": True}},
}


def both_ways() -> dict[str, tuple[Tensor, Tensor]]:
    found = {name: (by_the_trainer(options, 1), by_hand(options, 1)) for name, options in HOOKS.items()}
    return {**found, "accumulated": (by_the_trainer({}, 2), by_hand({}, 2))}


@pytest.mark.dist
def test_a_handwritten_loop_has_the_trainer_s_bits_under_every_hook() -> None:
    first, second = run_ranks(both_ways, 2)
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


def wrap_cases() -> list[Any]:
    return [gradients_while_accumulating(), frozen()]


@pytest.mark.dist
def test_ddp_wraps_what_is_trained_and_broadcasts_what_is_not() -> None:
    for reduced, (itself, weight) in run_ranks(wrap_cases, 2):
        assert reduced == [False, True]
        assert itself
        assert weight == [5.0]


def test_wrap_in_one_process_is_the_module_itself() -> None:
    for strategy in (Strategy(), connected()):
        module = nn.Linear(2, 1)
        assert strategy.wrap(module) is strategy.unwrap(module) is module


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"comm_hook": "powersgd"}, r"comm_hook='powersgd'.*Did you mean 'power_sgd'"),
        ({"comm_hook": "batched_power_sgd"}, r"Use comm_hook='power_sgd', with comm_state="),
        ({"comm_hook": "power_sgd", "comm_wrapper": "fp8"}, r"comm_wrapper='fp8'.*no, fp16, bf16"),
        ({"comm_wrapper": "fp16"}, r"comm_wrapper='fp16' belongs to comm_hook='power_sgd'"),
        ({"comm_hook": "fp16", "comm_state": {"rank": 2}}, r"comm_state=.* belongs to"),
        ({"comm_hook": "power_sgd", "comm_state": {"rank": 2}}, r"unexpected keyword argument 'rank'.*PowerSGDState"),
        ({"comm_hook": "power_sgd", "comm_state": {"start_powerSGD_iter": 1}}, r"`start_powerSGD_iter` > 1"),
        ({"comm_hook": "post_local_sgd", "comm_state": {"periods": 2}}, r"'periods'.*period, warmup_steps and within"),
        ({"comm_hook": "post_local_sgd", "comm_state": {"period": 0}}, r"period=0: expected an integer of at least 1"),
        ({"comm_hook": "post_local_sgd", "comm_state": {"within_node": 1}}, r"within_node.*True or False"),
        ({"comm_hook": "post_local_sgd", "zero_redundancy_optimizer": True}, r"needs replicas that are alike"),
        ({"consolidate_optimizer": True}, r"belongs to zero_redundancy_optimizer=True"),
        ({"static_graph": 1}, r"static_graph=1: expected True or False"),
        ({"bucket_cap_mb": 0}, r"bucket_cap_mb=0: expected a number of MiB above 0"),
        ({"bucket_cap": 5}, r"option='bucket_cap' is not known.*bucket_cap_mb"),
        ({"device_ids": [0]}, r"option='device_ids' is not known"),
    ],
)
def test_options_are_checked_at_construction(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        DDPStrategy(**options)


def test_copies_share_the_process_group_only() -> None:
    group = threading.Lock()  # which cannot be copied either
    strategy = DDPStrategy(process_group=group)
    other = copy.deepcopy(strategy)
    assert other.ddp_options["process_group"] is group
    assert other.ddp_options is not strategy.ddp_options
    assert other._shards is not strategy._shards


# ---- torch's options


class HalfUsed(Deep):
    """One layer takes no part, and buffers count the batches of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 4)
        self.batches = nn.Buffer(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1 + PartialState().process_index
        return super().training_step(batch, batch_idx)


OPTIONS: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "all three": {"static_graph": True, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    "one bucket": {"bucket_cap_mb": 25},
    "no buffers": {"broadcast_buffers": False},
}


def unused(**options: Any) -> tuple[list[float], float]:
    module = HalfUsed()
    by_the_trainer(options, 1, module)
    return vector(module.layer).tolist(), module.batches.item()


def with_options() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "plain": by_the_trainer({}, 2),
        "same": {name: by_the_trainer(options, 2) for name, options in OPTIONS.items()},
        "unused": {
            "found": unused(find_unused_parameters=True),
            "static": unused(static_graph=True),
            "own buffers": unused(find_unused_parameters=True, broadcast_buffers=False),
        },
        "joined": joined(),
        "named": named(),
    }


def named() -> str:
    with pytest.raises(HookError) as caught:
        by_the_trainer({}, 1, HalfUsed())
    return str(caught.value)


class Uneven(IterableDataset[Any]):
    """Rank 0 has 4 samples, rank 1 has 6."""

    def __iter__(self) -> Any:
        x, y = samples(10).tensors
        yield from zip(*((x[:4], y[:4]) if PartialState().process_index == 0 else (x[4:], y[4:])), strict=True)


def joined() -> dict[str, Any]:
    """Weights after an epoch of uneven data, by what is done about it."""
    found: dict[str, Any] = {}
    for uneven in ("stop", "join", "error"):
        torch.manual_seed(1)
        module, trainer = Toy(), quiet(max_epochs=1, uneven=uneven)
        with pytest.raises(DataError, match="1 of 2 ranks have no batch 2") if uneven == "error" else nullcontext():
            trainer.fit(module, DataLoader(Uneven(), batch_size=2))
        found[uneven] = (trainer.global_step, vector(module))
    return found


def joined_alone() -> Tensor:
    """What `joined` means: the mean over the samples that there are."""
    torch.manual_seed(1)
    module = Toy()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = samples(10).tensors
    for rows in ([0, 1, 4, 5], [2, 3, 6, 7], [8, 9]):
        optimizer.zero_grad()
        module.loss((x[rows], y[rows])).backward()
        optimizer.step()
    return vector(module)


@pytest.mark.dist
def test_torch_s_options_train_the_same_weights() -> None:
    first, second = run_ranks(with_options, 2)
    for name, weights in first["same"].items():
        if "static_graph" in OPTIONS[name]:  # the first window's gradients are averaged as they come
            torch.testing.assert_close(weights, first["plain"], atol=1e-6, rtol=0, msg=name)
        else:
            assert torch.equal(weights, first["plain"]), name
        assert torch.equal(weights, second["same"][name]), name
    layer, _ = first["unused"]["found"]
    for results, own in ((first, 8.0), (second, 16.0)):  # shared ones are the first rank's, as in its checkpoint
        assert results["unused"]["found"] == results["unused"]["static"] == (layer, 8.0)
        assert results["unused"]["own buffers"] == (layer, own)
        assert "took no part in the last loss" in results["named"]
        assert "never complete: idle.weight, idle.bias. Use strategy='ddp_find_unused_par" in results["named"]
    assert [results["joined"]["stop"][0] for results in (first, second)] == [2, 2]
    for results in (first, second):
        steps, weights = results["joined"]["join"]
        assert steps == 3
        torch.testing.assert_close(weights, joined_alone(), atol=1e-6, rtol=0)


def test_a_static_graph_is_refused_in_manual_optimization() -> None:
    with pytest.raises(SettingError, match="static_graph=True needs one backward per step"):
        connected(static_graph=True).prepare_training(Accumulating(False), [])


def test_steps_that_meet_cannot_be_joined() -> None:
    strategy = DDPStrategy(zero_redundancy_optimizer=True)
    strategy._ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(UsageError, match=r"zero_redundancy_optimizer=True.*Give all ranks as many batches"):
        strategy.join()
