"""A schedule that goes on with another learning rate is the schedule that had it from the beginning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from instep.errors import SettingError
from instep.utils.optimizers import checked_schedule, follow_schedule, put_rates, rates_of, set_learning_rates


def optimizer_of(lr: Any, kind: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
    return kind([{**group, "lr": lr * (index + 1)} for index, group in enumerate(groups)], lr=lr, **options)


def warmup_cosine(optimizer: Any, lr: float) -> Any:
    parts = [lrs.LinearLR(optimizer, 0.1, total_iters=4), lrs.CosineAnnealingLR(optimizer, 12, eta_min=0.003)]
    return lrs.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULES: dict[str, Callable[[Any, float], Any]] = {
    "step": lambda o, lr: lrs.StepLR(o, 3, 0.5),
    "exponential": lambda o, lr: lrs.ExponentialLR(o, 0.9),
    "lambda": lambda o, lr: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o, lr: lrs.CosineAnnealingLR(o, 12),
    "cosine-to-a-floor": lambda o, lr: lrs.CosineAnnealingLR(o, 12, eta_min=0.003),
    "restarts": lambda o, lr: lrs.CosineAnnealingWarmRestarts(o, 5, eta_min=0.003),
    "one-cycle": lambda o, lr: lrs.OneCycleLR(o, [lr, 2 * lr], total_steps=30),
    "cyclic": lambda o, lr: lrs.CyclicLR(o, [lr, 2 * lr], [10 * lr, 20 * lr], step_size_up=3, cycle_momentum=False),
    "sequential": warmup_cosine,
    "chained": lambda o, lr: lrs.ChainedScheduler([lrs.LinearLR(o, 0.1, total_iters=4), lrs.ExponentialLR(o, 0.9)]),
}


def rates(optimizer: Any, scheduler: Any, steps: int) -> list[list[float]]:
    seen = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
    return seen


@pytest.fixture(autouse=True)
def _torch_warns_of_itself():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The epoch parameter in", UserWarning)
        yield


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["float", "tensor"])
@pytest.mark.parametrize("at", [2, 9])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_changed_learning_rate_gives_the_schedule_that_began_with_it(make: Any, at: int, kind: Any):
    first = 0.1 if kind is torch.optim.SGD else torch.tensor(0.1, dtype=torch.float64)
    whole = optimizer_of(0.04)
    expected = rates(whole, make(whole, 0.04), 16)[at:]
    optimizer = optimizer_of(first, kind, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    scheduler = make(optimizer, 0.1)
    if torch.is_tensor(first) and optimizer.param_groups[0]["lr"] is optimizer.param_groups[0]["initial_lr"]:
        pytest.skip("SequentialLR of this torch makes one tensor of the rate and its base: torch 2.9's does")
    rates(optimizer, scheduler, at)
    set_learning_rates([optimizer], [scheduler], [0.04, 0.08])
    assert torch.is_tensor(optimizer.param_groups[0]["lr"]) == torch.is_tensor(first)
    assert [float(it) for it in scheduler.get_last_lr()] == [float(g["lr"]) for g in optimizer.param_groups]
    torch.testing.assert_close(rates(optimizer, scheduler, 16 - at), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_twice_the_same_rate_is_once(make: Any):
    optimizer = optimizer_of(0.1, momentum=0.9)
    scheduler = make(optimizer, 0.1)
    rates(optimizer, scheduler, 5)
    set_learning_rates([optimizer], [scheduler], 0.03)
    once = (rates_of(optimizer), scheduler.state_dict())
    set_learning_rates([optimizer], [scheduler], 0.03)
    assert str((rates_of(optimizer), scheduler.state_dict())) == str(once)


def test_without_a_schedule_and_with_several_optimizers():
    two = [optimizer_of(0.1), optimizer_of(0.2)]
    plateau = lrs.ReduceLROnPlateau(two[1])
    set_learning_rates(two, [plateau], 0.5)
    assert [group["lr"] for it in two for group in it.param_groups] == [0.5] * 4
    set_learning_rates(two, [plateau], [1, 2, 3, 4])
    assert [group["lr"] for it in two for group in it.param_groups] == [1, 2, 3, 4]
    with pytest.raises(SettingError, match="lr has 3 learning rates, and the optimizers have 4 parameter groups"):
        set_learning_rates(two, [plateau], [1, 2, 3])


def test_rates_are_set_from_zero():
    optimizer = optimizer_of(0.0)
    scheduler = lrs.LambdaLR(optimizer, lambda step: 0.5)
    set_learning_rates([optimizer], [scheduler], 1.0)
    assert rates(optimizer, scheduler, 2) == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_new_optimizer_follows_a_restored_schedule(make: Any):
    first = optimizer_of(0.1, momentum=0.9)
    scheduler = make(first, 0.1)
    rates(first, scheduler, 6)
    state = scheduler.state_dict()
    expected = rates(first, scheduler, 8)
    second = optimizer_of(0.1, momentum=0.9)
    restored = make(second, 0.1)
    restored.load_state_dict(state)
    follow_schedule(restored)
    torch.testing.assert_close(rates(second, restored, 8), expected, rtol=1e-12, atol=0)


def test_rates_can_be_put_back():
    optimizer = optimizer_of(torch.tensor(0.1), torch.optim.Adam)
    lrs.ExponentialLR(optimizer, 0.5)
    before = rates_of(optimizer)
    for group in optimizer.param_groups:
        group["lr"].fill_(7.0)
        group["initial_lr"] = 9.0
    put_rates(optimizer, before)
    assert [(float(g["lr"]), float(g["initial_lr"])) for g in optimizer.param_groups] == [
        (pytest.approx(0.1), pytest.approx(0.1)),
        (pytest.approx(0.2), pytest.approx(0.2)),
    ]


def test_the_state_of_a_users_own_schedule_may_have_any_names():
    class Warmed:
        """Wraps schedules, and saves what it likes."""

        def __init__(self) -> None:
            self._schedulers = [1, 2]
            self.done = 0

        @property
        def base(self) -> int:
            return self.done

        def state_dict(self) -> dict[str, int]:
            return {"base": self.done}

    assert checked_schedule(Warmed(), {"base": 4}) == {"base": 4}
    with pytest.raises(TypeError, match="base is 'x'"):
        checked_schedule(Warmed(), {"base": "x"})
    schedule = lrs.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1)
    with pytest.raises(TypeError, match="'step' is no setting"):
        checked_schedule(schedule, {**schedule.state_dict(), "step": 3})
