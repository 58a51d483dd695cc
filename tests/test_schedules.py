"""Schedules have torch's and transformers' values, step once per optimizer step, and are saved as numbers and words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from instep import schedules
from instep.cli.trainer_parser import LRSchedulerOptions, with_length
from instep.errors import SettingError
from tests.trainer.toys import Toy, loader, quiet


def optimizer() -> SGD:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (0.3, 0.01)]
    return SGD(groups)


def rates(make: Callable[[SGD], Any], steps: int) -> list[float]:
    sgd, values = optimizer(), []
    schedule = make(sgd)
    for _ in range(steps):
        values += [group["lr"] for group in sgd.param_groups]
        sgd.step()
        schedule.step()
    return values


@pytest.mark.parametrize("total, warmup", [(50, 0.3), (10, 0.3), (37, 0.25)])
@pytest.mark.parametrize("ours, theirs", [("cosine", "cos"), ("linear", "linear")])
def test_one_cycle_has_torchs_rates(total: int, warmup: float, ours: Any, theirs: Any) -> None:
    got = rates(lambda sgd: schedules.one_cycle(sgd, total, warmup_steps=warmup, anneal=ours), total)
    want = rates(
        lambda sgd: lr_scheduler.OneCycleLR(
            sgd, [0.3, 0.01], total_steps=total, pct_start=warmup, anneal_strategy=theirs, cycle_momentum=False
        ),
        total,
    )
    assert got == pytest.approx(want, abs=1e-15)


@pytest.mark.transformers
def test_the_others_have_the_rates_of_transformers() -> None:
    from transformers import optimization as hf  # late: an extra

    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (lambda o: schedules.constant(o, warmup_steps=7), lambda o: hf.get_constant_schedule_with_warmup(o, 7)),
        (lambda o: schedules.linear(o, 50, warmup_steps=7), lambda o: hf.get_linear_schedule_with_warmup(o, 7, 50)),
        (lambda o: schedules.cosine(o, 50, warmup_steps=7), lambda o: hf.get_cosine_schedule_with_warmup(o, 7, 50)),
        (
            lambda o: schedules.cosine(o, 50, warmup_steps=7, min_ratio=0.1),
            lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, 7, 50, min_lr_rate=0.1),
        ),
        (lambda o: schedules.inverse_sqrt(o, warmup_steps=7), lambda o: hf.get_inverse_sqrt_schedule(o, 7)),
        (lambda o: schedules.inverse_sqrt(o), lambda o: hf.get_inverse_sqrt_schedule(o, 0)),
        *(
            (
                lambda o, kind=kind: schedules.wsd(
                    o, 50, warmup_steps=7, decay_steps=13, decay=kind, start_ratio=0.2, min_ratio=0.2
                ),
                lambda o, kind=kind: hf.get_wsd_schedule(o, 7, 13, 50, decay_type=kind, min_lr_ratio=0.2),
            )
            for kind in ("linear", "cosine")
        ),
    ]
    for ours, theirs in pairs:
        assert rates(ours, 51) == pytest.approx(rates(theirs, 51), abs=1e-15)


def test_a_decayed_rate_stays_where_it_is() -> None:
    for name in ("linear", "cosine", "wsd"):
        schedule = schedules.make(name, optimizer(), total_steps=10, min_ratio=0.25)
        assert [schedule.rate_at(step) for step in (10, 15, 20)] == [0.25] * 3


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_the_state_is_plain_and_other_arguments_are_those_of_the_program(name: str) -> None:
    first = schedules.make(name, optimizer(), total_steps=10, warmup_steps=2)
    for _ in range(5):
        first.optimizer.step()
        first.step()
    state = json.loads(json.dumps(first.state_dict()))
    again = schedules.make(name, optimizer(), total_steps=10, warmup_steps=2)
    again.load_state_dict(state)
    assert again.get_last_lr() == first.get_last_lr()
    longer = schedules.make(name, optimizer(), total_steps=20, warmup_steps=8)
    with pytest.warns(UserWarning, match=r"warmup_steps=8(.0)? \(there 2(.0)?\)"):
        longer.load_state_dict(state)
    assert longer.last_epoch == 5
    assert [group["lr"] for group in longer.optimizer.param_groups] == pytest.approx(
        [0.3 * longer.rate_at(5), 0.01 * longer.rate_at(5)]
    )


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("cosin", {}, "cosine"),
        ("cosine", {}, "total_steps=None: expected the optimizer steps of the run"),
        ("linear", {"total_steps": float("inf")}, "infinite without max_epochs"),
        ("linear", {"total_steps": 10, "warmup_steps": 11}, "from 0 to total_steps=10"),
        ("linear", {"total_steps": 10, "min_ratio": 2}, "min_ratio=2"),
        ("wsd", {"total_steps": 10, "warmup_steps": 6, "decay_steps": 5}, "are 11 steps, more than"),
        ("wsd", {"total_steps": 10, "decay": "cubic"}, "decay"),
        ("constant", {"warmup_steps": 0.1}, "warmup_steps=0.1"),
        ("inverse_sqrt", {"warmup_steps": 0.1}, "a part of a run needs total_steps"),
        ("cosine", {"total_steps": 10, "warm_up": 1}, "no argument 'warm_up'; it takes total_steps, warmup_steps"),
    ],
)
def test_wrong_arguments_of_schedules_are_named(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        schedules.make(name, optimizer(), **arguments)


class Scheduled(Toy):
    """Returns a schedule as it is, and keeps the rate of each step."""

    def configure_optimizers(self) -> Any:
        sgd = SGD(self.parameters(), lr=0.1)
        self.used: list[float] = []
        sgd.register_step_pre_hook(lambda one, *_: self.used.append(one.param_groups[0]["lr"]))
        return [sgd], [schedules.linear(sgd, self.trainer.estimated_stepping_batches)]


def test_a_trainer_steps_it_once_per_optimizer_step() -> None:
    module = Scheduled()
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(module, loader(20, 2))
    assert module.used == pytest.approx([0.1 * (1 - step / 10) for step in range(10)])


def test_a_configuration_names_it() -> None:
    """`instep fit` gives it the length of the run, and steps it per optimizer step."""

    class Run:
        class trainer:
            estimated_stepping_batches = 12

    init = {"class_path": "instep.schedules.cosine", "init_args": {"total_steps": None, "warmup_steps": 3}}
    assert with_length(init, Run())["init_args"]["total_steps"] == 12  # type: ignore[arg-type]
    assert LRSchedulerOptions().of(schedules.constant(optimizer()))["interval"] == "step"
